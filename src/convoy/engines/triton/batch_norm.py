"""triton.batch_norm: batch norms of a training step, with ReLU, sum or mask, in two launches (docs/kernels/training.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.gpu.device_tensors import as_images, dense_nhwc, fits_tma, pitch_of, sliced_nhwc
from convoy.engines.gpu.gpu_support_checks import INDEX_LIMIT, subgraph_support, values_support
from convoy.engines.triton.batch_norm_graph import Norm, norm_of
from convoy.engines.triton.triton_build import TORCH_DTYPE, KernelBuild, TritonKernel, interpreting, shared_limit
from convoy.errors import LaunchError
from convoy.problem import DTYPE_BYTES, Knobs, Problem, SubgraphProblem
from convoy.support import Support
from convoy.target import Target

MOST_PARTS = 128
"""Parts of the rows that are summed apart, at most: each program of the second kernel reads all of its channels' parts."""

_LAUNCHES_US, _BYTES_US, _CACHED_US = 3.0, 2.4e6, 5e6
"""Two launches, and bytes a microsecond from memory and from an H100's second-level cache."""

_UNDER_WAY = 16e3
"""Bytes in flight that a multiprocessor needs for full memory bandwidth: 3.35 TB/s times 0.6 µs over 132 multiprocessors. Two
forward norms of GoogLeNet with half of that ran at half of an H100's bandwidth (bench/results/pieces-*.csv, commit 3175e1f)."""

_ROWS = dict.fromkeys(("rows", "each", "c"), "i32")
"""Arguments of every kernel that describe its rows."""

_CACHE_BYTES = 30e6
"""Bytes that stay in the L2 cache: data read again within a microsecond or two comes from there."""


class BatchNormExecutable(Executable):
    """Both kernels of one problem."""

    def __init__(self, engine: str, norm: Norm, knobs: Knobs, target: Target) -> None:
        self.norm = norm
        self.block_r, self.block_c = knobs.integer("block_r"), knobs.integer("block_c")
        self.columns = -(-norm.c // self.block_c)
        self.parts = knobs.integer("parts")
        # Statistics that nobody reads are still written, behind the partial sums.
        self.workspace_bytes = 4 * norm.c * (2 * self.parts + 4)
        self._warps, self._stages = knobs.integer("warps"), knobs.integer("stages")
        self._waits = target.capability >= 90 and not interpreting()
        self._engine = engine
        self.sums, self.rest = (TritonKernel(build, target) for build in self._builds())

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """The forward pass's images may be channels of a larger tensor; volumes may not."""
        norm = self.norm
        fits = (
            pitch % norm.unit == 0
            and norm.rows * pitch < INDEX_LIMIT
            and fits_tma(TORCH_DTYPE[norm.dtype], pitch, offset)
        )
        return norm.forward and norm.results[result] == "y" and fits and not norm.volumes

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Sums, then the rest."""
        norm = self.norm
        assert workspace is not None
        given = {
            role: self._checked(role, t) for role, t in zip(norm.args, buffers.args, strict=True) if role != "unused"
        }
        made = {role: self._result(role, t) for role, t in zip(norm.results, buffers.results, strict=True)}
        floats = workspace[: self.workspace_bytes].view(torch.float32)
        parts, spare = floats[: 2 * self.parts * norm.c], iter(torch.split(floats[2 * self.parts * norm.c :], norm.c))
        statistics = ("mean", "rstd", "new_mean", "new_var") if norm.forward else ("dweight", "dbias")
        made |= {role: next(spare) for role in statistics if role not in made}
        each = -(-norm.rows // self.parts)
        unit = norm.unit
        sizes = [norm.rows, each, norm.c // unit]
        grid = (self.parts, self.columns, 1)
        if norm.forward:
            self.sums(grid, [given["x"], parts, *sizes])
            self.rest(grid, self._normalise(given, made, parts, sizes, unit))
            return
        part = given["dy"].narrow(1, norm.start, norm.c)
        dy, pitch = [part, given.get("more"), given.get("y")], (norm.whole_c or norm.c) // unit
        self.sums(grid, [*dy, given["x"], given["mean"], parts, made.get("masked"), *sizes, pitch])
        named = [
            given["x"],
            given["weight"],
            given["mean"],
            given["rstd"],
            parts,
            *(made[n] for n in ("dx", "dweight", "dbias")),
        ]
        self.rest(grid, [*dy, *named, *sizes, pitch, self.parts, 1.0 / norm.rows])

    def _normalise(
        self,
        given: Mapping[str, torch.Tensor],
        made: Mapping[str, torch.Tensor],
        parts: torch.Tensor,
        sizes: Sequence[int],
        unit: int,
    ) -> list[object]:
        norm = self.norm
        read = [given[name] for name in ("x", "weight", "bias", "mean", "var")]
        written = [made[name] for name in ("y", "mean", "rstd", "new_mean", "new_var")]
        numbers = [1.0 / norm.rows, norm.rows / (norm.rows - 1), norm.momentum, norm.eps]
        pitch = pitch_of(made["y"]) // unit
        return [*read, given.get("residual"), parts, *written, *sizes, self.parts, pitch, *numbers]

    def _checked(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        return dense_nhwc(role, as_images(tensor)) if tensor.dim() > 1 else tensor.contiguous()

    def _result(self, role: str, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise LaunchError(f"{role}: no tensor was given to write to")
        return sliced_nhwc(role, as_images(tensor)) if role == "y" else self._checked(role, tensor)

    def _builds(self) -> list[KernelBuild]:
        """The two kernels: partial sums over parts of the rows, then the results."""
        shape = {
            "BLOCK_R": self.block_r, "BLOCK_C": self.block_c, "VECTOR": self.norm.unit, "STAGES": self._stages,
            "WAIT": self._waits,
        }  # fmt: skip
        sums = {"PARTS": max(16, 1 << (self.parts - 1).bit_length())}
        return self._forward(shape, sums) if self.norm.forward else self._backward(shape, sums)

    def _forward(self, shape: Mapping[str, object], sums: Mapping[str, object]) -> list[KernelBuild]:
        from convoy.engines.triton.kernels.batch_norm_kernels import moments, normalise  # pyright: ignore[reportUnknownVariableType]

        norm, images = self.norm, f"*{self.norm.dtype}"
        fused = {"RELU": norm.relu, "RESIDUAL": "residual" in norm.args}
        rest = {
            "x": images,
            **dict.fromkeys(("weight", "bias", "mean", "var"), "*fp32"),
            "residual": images if fused["RESIDUAL"] else "none",
            "parts": "*fp32",
            "y": images,
            **dict.fromkeys(("save_mean", "save_rstd", "new_mean", "new_var"), "*fp32"),
            **_ROWS,
            "programs": "i32",
            "pitch": "i32",
            **dict.fromkeys(("inverse", "unbiased", "momentum", "eps"), "fp32"),
        }
        return [
            self._build(moments, {"x": images, "parts": "*fp32", **_ROWS}, shape),
            self._build(normalise, rest, {**shape, **fused, **sums}),
        ]

    def _backward(self, shape: Mapping[str, object], sums: Mapping[str, object]) -> list[KernelBuild]:
        from convoy.engines.triton.kernels.batch_norm_kernels import gradient_sums, gradients  # pyright: ignore[reportUnknownVariableType]

        norm, images = self.norm, f"*{self.norm.dtype}"
        fused = {"MORE": "more" in norm.args, "RELU": norm.relu}
        masked = "masked" in norm.results
        dy = {
            "dy": images,
            "more": images if fused["MORE"] else "none",
            "y": images if norm.relu else "none",
            "x": images,
        }
        first = {
            **dy,
            "mean": "*fp32",
            "parts": "*fp32",
            "masked": images if masked else "none",
            **_ROWS,
            "pitch": "i32",
        }
        rest = {
            **dy,
            **dict.fromkeys(("weight", "mean", "rstd", "parts"), "*fp32"),
            "dx": images,
            "dweight": "*fp32",
            "dbias": "*fp32",
            **_ROWS,
            "pitch": "i32",
            "programs": "i32",
            "inverse": "fp32",
        }
        return [
            self._build(gradient_sums, first, {**shape, **fused, "MASKED": masked}),
            self._build(gradients, rest, {**shape, **fused, **sums}),
        ]

    def _build(self, function: Any, signature: Mapping[str, str], constants: Mapping[str, object]) -> KernelBuild:
        images = [name for name, kind in signature.items() if kind == f"*{self.norm.dtype}"]
        return KernelBuild(
            self._engine, function, signature, constants, [*images, "parts"], self._warps, 1, self._waits,
            tensor_cores=False,
        )  # fmt: skip


def parts_of(norm: Norm, block_r: int, block_c: int, wanted: int) -> int:
    """Programs along the rows: as many as fill the GPU, each with at least one tile of rows."""
    return max(1, min(MOST_PARTS, wanted // -(-norm.c // block_c), -(-norm.rows // block_r)))


class BatchNormEngine(Engine):
    """With batch statistics, forward and backward; see `kernels/batch_norm.py`."""

    id = "triton.batch_norm"
    family = "direct"
    devices = ("cuda",)
    writes_slices = True
    patterns = ("norm",)
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """One batch norm of a training step, in channels_last and fp16, bf16 or fp32, on capability 8.0 and newer."""
        norm = norm_of(problem) if isinstance(problem, SubgraphProblem) else None
        layout = "nhwc" if norm is None else norm.layout
        if not (found := subgraph_support(problem, target, "computes batch norms", layout)):
            return found
        if norm is None:
            return Support.no(
                "computes a batch norm with batch statistics and the operators fused with it, got another subgraph"
            )
        if not (found := values_support(norm.dtype, norm.rows * max(norm.c, norm.whole_c))):
            return found
        if norm.rows < 2:
            return Support.no("needs at least two values per channel")
        if norm.start * DTYPE_BYTES[norm.dtype] % 16:
            return Support.no(f"needs a gradient slice that begins at a multiple of 16 bytes, got channel {norm.start}")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles of 2048 to 8192 values."""
        norm = _known(problem)
        most = max(16, min(128, 1 << (norm.c - 1).bit_length()))
        tiles = [
            (values // block_c, block_c, warps)
            for values, warps in ((4096, 4), (2048, 4), (8192, 8))
            for block_c in dict.fromkeys((min(64, most), most, 32))
            if block_c <= most
        ]
        found = [
            Knobs.of(block_r=r, block_c=c, warps=warps, parts=parts_of(norm, r, c, waves * target.units), stages=stages)
            for r, c, warps in tiles
            for waves in (2, 4, 1)
            for stages in (1, 3)
            if (stages - 1) * r * c * _read_bytes(norm) <= shared_limit(target)
        ]
        return sorted(dict.fromkeys(found), key=lambda knobs: self.estimate_us(problem, knobs, target) or 0.0)

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The parts' sums, and statistics that nobody reads."""
        return 4 * _known(problem).c * (2 * knobs.integer("parts") + 4)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """Data that is read twice comes from the L2 cache the second time, if it fits."""
        norm = _known(problem)
        one = norm.rows * norm.c * DTYPE_BYTES[norm.dtype]
        again = 1 if norm.forward else sum(role in ("dy", "more", "y", "x") for role in norm.args)
        others = sum(role == "residual" for role in norm.args)
        others += sum(role in ("y", "dx", "masked") for role in norm.results)
        cached = again * one <= _CACHE_BYTES
        block_c, width = knobs.integer("block_c"), DTYPE_BYTES[norm.dtype]
        columns = -(-norm.c // block_c)
        programs = knobs.integer("parts") * columns / target.units
        # Of a loop without a pipeline every other moment has loads under way.
        stages = knobs.integer("stages")
        under_way = again * knobs.integer("block_r") * block_c * width * programs * (0.5 if stages == 1 else stages - 1)
        alone = norm.rows <= knobs.integer("parts") * knobs.integer(
            "block_r"
        )  # the loop has one iteration: nothing to pipeline
        busy = min(1.0, programs) if alone else under_way / (under_way + _UNDER_WAY / 4)
        moved = (again + others) * one / _BYTES_US + again * one / (_CACHED_US if cached else _BYTES_US)
        narrow = 1.1 if block_c * width < 128 else 1.0  # bytes of a line of the cache
        waste = columns * block_c / max(1, norm.c)
        sums = knobs.integer("parts") ** 2 * norm.c * 8  # each program of the second kernel reads its channels' parts
        return _LAUNCHES_US + sums / _CACHED_US + moved * waste * narrow / max(busy, 1e-3)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile both kernels."""
        return BatchNormExecutable(self.id, _known(problem), knobs, target)


def _read_bytes(norm: Norm) -> int:
    """Bytes per value that one loop iteration reads; a pipeline keeps them in shared memory."""
    return DTYPE_BYTES[norm.dtype] * sum(role in ("dy", "more", "y", "x", "residual") for role in norm.args)


def _known(problem: Problem) -> Norm:
    assert isinstance(problem, SubgraphProblem)
    norm = norm_of(problem)
    assert norm is not None
    return norm


ENGINE = BatchNormEngine()
