"""triton.gemv: linear layers and 1x1 convolutions on 1x1 maps at small batch, exact in fp32 (docs/kernels/triton.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.gpu.device_tensors import as_floats, checked, scratch, vector
from convoy.engines.gpu.gpu_support_checks import conv_support, linear_support
from convoy.engines.triton.igemm_swap_ab_launch import ReduceSplits
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.problem import ConvProblem, Epilogue, Knobs, LinearProblem, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

_LARGEST_BATCH = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """The matrix product y[n, k] = x[n, c] · w[k, c]^T of a problem."""

    n: int
    c: int
    k: int
    dtype: str

    @staticmethod
    def of(problem: ConvProblem | LinearProblem) -> Sizes:
        """Sizes of a linear layer, or of a 1x1 convolution on a 1x1 map."""
        dtype = problem.dtype if isinstance(problem, LinearProblem) else problem.x_dtype
        return Sizes(problem.n, problem.c, problem.k, dtype)

    def splits(self, knobs: Knobs) -> tuple[int, int]:
        """Shares of c that are not empty, and blocks of each."""
        blocks = -(-self.c // knobs.integer("block_c"))
        each = -(-blocks // knobs.integer("split"))
        return -(-blocks // each), each


class GemvExecutable(Executable):
    """One tile of the gemv kernel for one problem."""

    def __init__(self, engine: str, problem: ConvProblem | LinearProblem, knobs: Knobs, target: Target) -> None:
        self.sizes, self.epilogue, self.knobs = Sizes.of(problem), problem.epilogue, knobs
        self.splits, self.each = self.sizes.splits(knobs)
        self.workspace_bytes = split_bytes(problem, knobs)
        if self.sizes.n == 0:
            return
        self.reduce = None
        if self.splits > 1:
            elements, k = self.sizes.n * self.sizes.k, self.sizes.k
            self.reduce = ReduceSplits(engine, elements, k, self.splits, self.sizes.dtype, self.epilogue, target)
        self.kernel = TritonKernel(self._build(engine, target), target)

    def _build(self, engine: str, target: Target) -> KernelBuild:
        from convoy.engines.triton.kernels.gemv_kernel import gemv  # pyright: ignore[reportUnknownVariableType]

        dtype, split = self.sizes.dtype, self.splits > 1
        fused = Epilogue() if split else self.epilogue
        hopper = target.capability >= 90 and not interpreting()
        dependent = bool(self.knobs["pdl"]) and hopper
        signature = {
            "x": f"*{dtype}", "w": f"*{dtype}", "y": "*fp32" if split else f"*{dtype}",
            "residual": f"*{dtype}" if fused.residual else "none", "bias": f"*{dtype}" if fused.bias else "none",
            "n": "i32", "c": "i32", "k": "i32", "blocks_split": "i32",
        }  # fmt: skip
        constants = {
            "BLOCK_N": self.knobs.integer("block_n"), "BLOCK_K": self.knobs.integer("block_k"),
            "BLOCK_C": self.knobs.integer("block_c"), "VECTOR": vector(self.sizes.c),
            "ACTIVATION": fused.activation, "SPLIT": split, "WAIT": dependent, "TRIGGER": (dependent or split) and hopper,
        }  # fmt: skip
        divisible = ["x", "w", "y", "residual", "bias"]
        warps, stages = self.knobs.integer("warps"), self.knobs.integer("stages")
        return KernelBuild(engine, gemv, signature, constants, divisible, warps, stages, dependent, tensor_cores=False)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch, or two where c is split."""
        sizes = self.sizes
        if sizes.n == 0:
            return
        x, y, residual = checked(buffers, self.epilogue.residual)
        weight, bias = buffers.constants[0], buffers.constants[1] if self.epilogue.bias else None
        block_n, block_k = self.knobs.integer("block_n"), self.knobs.integer("block_k")
        grid = (-(-sizes.k // block_k), self.splits, -(-sizes.n // block_n))
        numbers = [sizes.n, sizes.c // vector(sizes.c), sizes.k, self.each]
        partial = scratch(workspace, self.workspace_bytes)
        if partial is None or self.reduce is None:
            self.kernel(grid, [x, weight, y, residual, bias, *numbers])
            return
        partial = as_floats(partial, self.splits * sizes.n * sizes.k)
        self.kernel(grid, [x, weight, partial, None, None, *numbers])
        self.reduce.launch(partial, y, residual, bias)


def split_bytes(problem: ConvProblem | LinearProblem, knobs: Knobs) -> int:
    """Bytes of the partial sums."""
    sizes = Sizes.of(problem)
    splits, _ = sizes.splits(knobs)
    return 4 * splits * sizes.n * sizes.k if splits > 1 else 0


class GemvEngine(Engine):
    """The weight read once at memory speed; see `kernels/gemv.py`."""

    id = "triton.gemv"
    family = "gemm"
    devices = ("cuda",)
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Linear layers and 1x1 convolutions on 1x1 maps with a batch of at most 8."""
        if isinstance(problem, LinearProblem):
            found = linear_support(problem, target, 80)
        elif found := conv_support(problem, target, 80):
            assert isinstance(problem, ConvProblem)
            if not (problem.is_pointwise and problem.h == problem.w == problem.groups == 1):
                return Support.no("needs a linear layer, or a 1x1 filter on a 1x1 map with groups = 1")
        if not found:
            return found
        assert isinstance(problem, ConvProblem | LinearProblem)
        if problem.n > _LARGEST_BATCH:
            return Support.no(f"needs a batch of at most {_LARGEST_BATCH}, got {problem.n}")
        return found

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Rows of a block, bytes in flight, and parts of c."""
        assert isinstance(problem, ConvProblem | LinearProblem)
        block_n = 1 << max(0, problem.n - 1).bit_length()
        found: list[tuple[float, Knobs]] = []
        for block_k in (1, 2, 4, 8, 16):
            for block_c in (256, 512, 1024, 2048):
                elements = block_n * block_k * block_c / 128
                if elements not in (8, 16, 32) or (block_c > 256 and block_c >= 2 * problem.c):
                    continue
                for stages in (2, 4):
                    for split in (1, 2, 4, 8):
                        knobs = Knobs.of(
                            block_n=block_n, block_k=block_k, block_c=block_c, warps=4, stages=stages, split=split, pdl=False
                        )  # fmt: skip
                        if Sizes.of(problem).splits(knobs)[0] == split:
                            found.append((self.estimate_us(problem, knobs, target), knobs))
        found.sort(key=lambda pair: pair[0])
        return [knobs for _, knobs in found[:20]]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The partial sums of a split reduction."""
        assert isinstance(problem, ConvProblem | LinearProblem)
        return split_bytes(problem, knobs)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """Bytes over the bandwidth that the blocks in flight reach, a wave at a time."""
        assert isinstance(problem, ConvProblem | LinearProblem)
        sizes = Sizes.of(problem)
        each_bytes = DTYPE_BYTES[sizes.dtype]
        splits, blocks = sizes.splits(knobs)
        thread_blocks = -(-sizes.k // knobs.integer("block_k")) * splits
        # Eight blocks of 128 threads lie on a multiprocessor at the registers these tiles take.
        waves = -(-thread_blocks // (8 * max(1, target.units)))
        in_flight = (
            min(thread_blocks, 8 * target.units) * knobs.integer("block_k") * knobs.integer("block_c") * each_bytes
        )
        bandwidth = min(3.0e6, in_flight / 0.8)  # bytes a microsecond at 0.8 µs of latency
        stream = sizes.c * sizes.k * each_bytes / max(bandwidth, 1.0)
        guess = 1.5 + max(stream, waves * blocks * 0.1) + 0.3 * waves
        return guess + (1.0 if splits > 1 else 0.0) - 0.02 * knobs.integer("stages")

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem | LinearProblem)
        return GemvExecutable(self.id, problem, knobs, target)


ENGINE = GemvEngine()
