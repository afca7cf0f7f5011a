"""triton.squeeze_excitation: mean, two small layers and the product with the gate in two launches (docs/kernels/triton.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import as_floats, dense_nhwc, scratch
from convoy.engines.gpu.gpu_support_checks import subgraph_support, values_support
from convoy.engines.triton.gates.squeeze_excitation_pattern import SqueezeExcitation, squeeze_excitations
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.errors import LaunchError
from convoy.graph.ir import Graph
from convoy.problem import DTYPE_BYTES, Knobs, Problem, SubgraphProblem
from convoy.support import Support
from convoy.target import Target

MOST_PARTS: Final = 128
"""Parts of the first layer's sums, at most: each program of the second kernel adds all of them."""

MOST_PART_VALUES: Final = 4096
"""Parts times hidden channels of a tile, at most: the second kernel holds them in registers."""

MOST_IMAGES: Final = (1 << 16) - 1
"""Limit of a grid's third dimension."""

_LAUNCHES_US, _BYTES_US, _CACHED_US, _CACHE_BYTES = 3.0, 2.5e6, 4e6, 15e6
"""Two launches; bytes a microsecond from memory and from the second-level cache, and how large x may be to stay there. Fitted to
the four fastest settings of seven blocks of EfficientNet-B0 at batch 1 and 32 on an H100 (12 %)."""

_WIDE_BYTES: Final = 64
"""Bytes of a pixel's channels that a program should read: with half of it, large images took 1.3 times as long."""


class SqueezeExcitationExecutable(Executable):
    """Both kernels of one problem."""

    def __init__(self, engine: str, block: SqueezeExcitation, knobs: Knobs, target: Target) -> None:
        self.block = block
        self._columns, self._rows = columns_of(block, knobs), knobs.integer("rows")
        self.workspace_bytes = workspace_of(block, knobs)
        self._engine, self._warps = engine, knobs.integer("warps")
        self._waits = target.capability >= 90 and not interpreting()
        tile = {
            "BLOCK_P": knobs.integer("block_p"), "BLOCK_C": knobs.integer("block_c"), "BLOCK_H": block_h(block),
            "WAIT": self._waits,
        }  # fmt: skip
        self.squeeze, self.excite = (TritonKernel(build, target) for build in self._builds(tile))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Both weights as [hidden, channels], so that programs read neighbouring channels, and biases in fp32, or None."""
        given = iter(constants)
        found: list[torch.Tensor | None] = []
        for bias, is_second in zip(self.block.biases, (False, True), strict=True):
            weight = next(given).flatten(1)
            found.append((weight.t() if is_second else weight).contiguous())
            found.append(next(given).float().contiguous() if bias else None)
        return tuple(found)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """The first layer's parts, then the rest."""
        block, result = self.block, buffers.results[0]
        space = scratch(workspace, self.workspace_bytes)
        if result is None or space is None:
            raise LaunchError("triton.squeeze_excitation: no tensor was given to write to")
        x, y = dense_nhwc("x", buffers.args[0]), dense_nhwc("y", result)
        residual = dense_nhwc("residual", buffers.args[1]) if block.residual else None
        weight, bias, second, shift = buffers.constants
        parts = as_floats(space, self.workspace_bytes // 4)
        grid = (self._rows, self._columns, block.images)
        sizes = [block.pixels, -(-block.pixels // self._rows), block.channels, block.hidden]
        self.squeeze(grid, [x, weight, parts, *sizes, 1.0 / block.pixels])
        programs = self._rows * self._columns
        self.excite(grid, [x, bias, second, shift, parts, residual, y, *sizes, programs])

    def _builds(self, tile: Mapping[str, object]) -> list[KernelBuild]:
        from convoy.engines.triton.kernels.squeeze_excitation_kernels import excite, squeeze  # pyright: ignore[reportUnknownVariableType]

        block, values = self.block, f"*{self.block.dtype}"
        sizes = dict.fromkeys(("pixels", "each", "c", "hidden"), "i32")
        first = {"x": values, "weight": values, "parts": "*fp32", **sizes, "inverse": "fp32"}
        bias, shift = ("*fp32" if there else "none" for there in block.biases)
        rest = {
            "x": values, "bias": bias, "weight": values, "shift": shift, "parts": "*fp32",
            "residual": values if block.residual else "none", "y": values, **sizes, "programs": "i32",
        }  # fmt: skip
        more = {
            "PARTS": 1 << (self._rows * self._columns - 1).bit_length(),
            "INNER": block.inner, "OUTER": block.outer, "RELU": block.relu,
        }  # fmt: skip
        return [self._build(squeeze, first, tile), self._build(excite, rest, {**tile, **more})]

    def _build(self, function: Any, signature: Mapping[str, str], constants: Mapping[str, object]) -> KernelBuild:
        divisible = [name for name, kind in signature.items() if kind.startswith("*") and name != "parts"]
        divisible += [
            name for name, size in (("c", self.block.channels), ("hidden", self.block.hidden)) if size % 16 == 0
        ]
        return KernelBuild(
            self._engine, function, signature, constants, divisible, self._warps, 1, self._waits, tensor_cores=False
        )


def block_h(block: SqueezeExcitation) -> int:
    """Hidden channels of a tile."""
    return min(64, max(16, 1 << (block.hidden - 1).bit_length()))


def columns_of(block: SqueezeExcitation, knobs: Knobs) -> int:
    """Tiles of channels."""
    return -(-block.channels // knobs.integer("block_c"))


def workspace_of(block: SqueezeExcitation, knobs: Knobs) -> int:
    """Bytes of the first layer's parts."""
    return 4 * block.images * knobs.integer("rows") * columns_of(block, knobs) * block.hidden


class SqueezeExcitationEngine(Engine):
    """The block, with the residual and the ReLU behind it; see `kernels/squeeze_excitation_kernels.py`."""

    id = "triton.squeeze_excitation"
    family = "direct"
    devices = ("cuda",)
    trusted = False
    fuses_subgraphs = True
    estimates_subgraphs = True

    def fusions(self, graph: Graph) -> Iterable[Sequence[str]]:
        """Each squeeze-and-excitation block."""
        return squeeze_excitations(graph)

    def supports(self, problem: Problem, target: Target) -> Support:
        """Blocks of NHWC images in fp16, bf16 or fp32, on capability 8.0 and newer."""
        if not (found := subgraph_support(problem, target, "computes squeeze-and-excitation blocks")):
            return found
        assert isinstance(problem, SubgraphProblem)
        block = SqueezeExcitation.of(problem)
        if block is None:
            return Support.no(
                "computes a mean, two 1x1 convolutions with activations and the product with the gate, got another subgraph"
            )
        if not 0 < block.images <= MOST_IMAGES or not block.pixels or not block.channels or not block.hidden:
            return Support.no(f"needs 1 to {MOST_IMAGES} images that are not empty, got {block.images}")
        if -(-block.channels // 128) > MOST_PARTS:
            return Support.no(f"needs at most {128 * MOST_PARTS} channels, got {block.channels}")
        return values_support(block.dtype, block.images * block.pixels * block.channels)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles of 1024 to 4096 values; as many parts of the pixels as fill the GPU once, twice or four times."""
        block = _known(problem)
        found: list[Knobs] = []
        for values, warps in ((2048, 4), (4096, 4), (1024, 4), (4096, 8)):
            for block_c in (64, 128, 32, 16):
                columns = -(-block.channels // block_c)
                block_p = max(1, values // block_c)
                room = min(MOST_PARTS, MOST_PART_VALUES // block_h(block)) // columns
                if not room or (block_c > 16 and block_c >= 2 * block.channels):
                    continue
                for waves in (1, 2, 4):
                    wanted = -(-waves * target.units // (block.images * columns))
                    rows = max(1, min(room, -(-block.pixels // block_p), wanted))
                    found.append(Knobs.of(block_p=block_p, block_c=block_c, rows=rows, warps=warps))
        if not found:
            found.append(Knobs.of(block_p=16, block_c=128, rows=1, warps=4))
        return sorted(dict.fromkeys(found), key=lambda knobs: self.estimate_us(problem, knobs, target))

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The first layer's parts."""
        return workspace_of(_known(problem), knobs)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The images once from memory and once more, from the cache if they fit; weights and parts for every program."""
        block = _known(problem)
        size = DTYPE_BYTES[block.dtype]
        one = block.images * block.pixels * block.channels * size
        rate = _CACHED_US if one <= _CACHE_BYTES else _BYTES_US
        columns = columns_of(block, knobs)
        programs = knobs.integer("rows") * columns
        busy = min(1.0, programs * block.images / target.units)
        narrow = math.sqrt(max(1.0, _WIDE_BYTES / (size * knobs.integer("block_c"))))
        waste = columns * knobs.integer("block_c") / block.channels * narrow
        each = block.hidden * (2 * size * knobs.integer("block_c") + 4 * (programs + 1))
        small = programs * block.images * each / _CACHED_US
        turns = -(-block.pixels // (knobs.integer("rows") * knobs.integer("block_p")))
        residual = one / rate if block.residual else 0.0
        return _LAUNCHES_US + 0.05 * turns + (small + 3 * one / rate * waste + residual) / busy

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile both kernels."""
        return SqueezeExcitationExecutable(self.id, _known(problem), knobs, target)


def _known(problem: Problem) -> SqueezeExcitation:
    assert isinstance(problem, SubgraphProblem)
    block = SqueezeExcitation.of(problem)
    assert block is not None
    return block


ENGINE = SqueezeExcitationEngine()
