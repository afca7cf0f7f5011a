"""cuda.squeeze_excitation: mean, two small layers and the product with the gate in two launches (docs/kernels/gates.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gates.squeeze_excitation_pattern import SqueezeExcitation, squeeze_excitations
from convoy.engines.gpu.device_tensors import as_floats, dense_nhwc, scratch
from convoy.engines.gpu.gpu_support_checks import subgraph_support, values_support
from convoy.engines.hopper.nvrtc_kernel import Function, SpillError, absence, compile_cubin, pointer
from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, kernel_source, nvrtc_options
from convoy.errors import InputError, LaunchError
from convoy.graph.ir import Graph
from convoy.problem import DTYPE_BYTES, Knobs, Problem, SubgraphProblem
from convoy.support import Support
from convoy.target import Target

MOST_PARTS: Final = 128
"""Parts of the first layer's sums, at most: each block of the second kernel adds all of them."""

MOST_HIDDEN: Final = 1024
"""Channels between the layers: shared memory holds them."""

_LOAD_BYTES: Final = 16

_LAUNCHES_US, _BYTES_US, _CACHED_US, _CACHE_BYTES = 3.0, 2.5e6, 4e6, 15e6
"""Two launches; bytes a microsecond from memory and from the second-level cache, and how large x may be to stay there. Fitted to
seven blocks of EfficientNet-B0 at batch 1 and 32 on an H100 (12 %), with kernels of the same two steps."""

_WIDE_BYTES: Final = 64
"""Bytes of a pixel's channels that a block should read: with half of it, large images took 1.3 times as long."""


@dataclass(frozen=True, slots=True)
class GateTile:
    """A tile configuration of `squeeze_excitation.cu`.

    Attributes:
        block_c: channels of a block.
        rows: parts of an image's pixels.
        threads: of a block, a multiple of `block_c`.
    """

    block_c: int
    rows: int
    threads: int

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(block_c=self.block_c, rows=self.rows, threads=self.threads)

    @classmethod
    def of(cls, knobs: Knobs) -> Self:
        """Inverse of `knobs`; raises InputError for knobs without a valid kernel."""
        tile = cls(*(knobs.integer(name) for name in ("block_c", "rows", "threads")))
        if tile.block_c not in (32, 64, 128) or tile.threads not in (128, 256) or tile.rows < 1:
            raise InputError("knobs", str(knobs), "block_c 32, 64 or 128, threads 128 or 256, and rows of at least 1")
        return tile

    def columns(self, block: SqueezeExcitation) -> int:
        """Blocks along the channels."""
        return -(-block.channels // self.block_c)

    def parts(self, block: SqueezeExcitation) -> int:
        """Blocks of an image, each with a part of the first layer's sums."""
        return self.rows * self.columns(block)

    def workspace_bytes(self, block: SqueezeExcitation) -> int:
        """Bytes of the parts."""
        return 4 * block.images * self.parts(block) * block.hidden

    def shared_bytes(self, block: SqueezeExcitation) -> tuple[int, int]:
        """Shared memory of a block of the first and of the second kernel, as they lay it out."""
        sums = self.threads * _LOAD_BYTES // DTYPE_BYTES[block.dtype] * 4
        adders = max(1, min(self.threads // block.hidden, self.parts(block)))
        return sums + 8 * (self.block_c + self.threads), 8 * ((adders + 1) * block.hidden + self.threads + self.block_c)

    def parameters(self, block: SqueezeExcitation, *, dependent: bool) -> dict[str, int]:
        """The values of `squeeze_excitation_config.cuh`."""
        return {
            "VALUE_BYTES": DTYPE_BYTES[block.dtype], "BFLOAT": int(block.dtype == "bf16"), "CHANNELS": block.channels,
            "HIDDEN": block.hidden, "PIXELS": block.pixels, "ROWS": self.rows, "BLOCK_C": self.block_c,
            "THREADS": self.threads, "INNER": ACTIVATIONS.index(block.inner), "OUTER": ACTIVATIONS.index(block.outer),
            "HAS_BIAS": int(block.biases[0]), "HAS_SHIFT": int(block.biases[1]), "HAS_RESIDUAL": int(block.residual),
            "RELU_BEHIND": int(block.relu), "DEPENDENT": int(dependent),
        }  # fmt: skip

    def guess_us(self, block: SqueezeExcitation, units: int) -> float:
        """Estimated microseconds: the images once from memory and once more, from the cache if they fit; weights and parts."""
        size = DTYPE_BYTES[block.dtype]
        one = block.images * block.pixels * block.channels * size
        rate = _CACHED_US if one <= _CACHE_BYTES else _BYTES_US
        busy = min(1.0, self.parts(block) * block.images / units)
        narrow = math.sqrt(max(1.0, _WIDE_BYTES / (size * self.block_c)))
        waste = self.columns(block) * self.block_c / block.channels * narrow
        each = block.hidden * (2 * size * self.block_c + 4 * (self.parts(block) + 1))
        small = self.parts(block) * block.images * each / _CACHED_US
        at_once = self.threads * _LOAD_BYTES // size // self.block_c  # pixels
        turns = -(-block.pixels // (self.rows * at_once))
        residual = one / rate if block.residual else 0.0
        return _LAUNCHES_US + 0.02 * turns + (small + 3 * one / rate * waste + residual) / busy

    def squeeze_us(self, block: SqueezeExcitation, units: int) -> float:
        """Estimated microseconds of the first launch: the images once, weights and parts."""
        plain = replace(block, residual=False)
        size = DTYPE_BYTES[block.dtype]
        one = block.images * block.pixels * block.channels * size
        rate = _CACHED_US if one <= _CACHE_BYTES else _BYTES_US
        return self.guess_us(plain, units) - _LAUNCHES_US / 2 - 2 * one / rate


def tiles(block: SqueezeExcitation, units: int) -> Iterator[GateTile]:
    """Configurations worth trying: as many parts of the pixels as fill the GPU once, twice or four times."""
    for threads in (128, 256):
        for block_c in (64, 128, 32):
            columns = -(-block.channels // block_c)
            if columns > MOST_PARTS or (block_c > 32 and block_c >= 2 * block.channels):
                continue
            at_once = threads * _LOAD_BYTES // DTYPE_BYTES[block.dtype] // block_c
            for waves in (1, 2, 4):
                wanted = -(-waves * units // (block.images * columns))
                yield GateTile(
                    block_c, max(1, min(MOST_PARTS // columns, -(-block.pixels // at_once), wanted)), threads
                )


class SqueezeExcitationExecutable(Executable):
    """Both kernels of one problem."""

    def __init__(self, engine: str, block: SqueezeExcitation, tile: GateTile, target: Target) -> None:
        self.block, self.tile, self.dependent = block, tile, target.capability >= 90
        self.last_readers = {0: -1, 1: -1}  # x and the residual
        self.workspace_bytes = tile.workspace_bytes(block)
        cubin, self.log = self._compiled(engine, target)
        names = ("squeeze", "excite")
        self.squeeze, self.excite = (
            Function(engine, cubin, name, shared)
            for name, shared in zip(names, tile.shared_bytes(block), strict=True)
        )  # fmt: skip

    def _compiled(self, engine: str, target: Target) -> tuple[bytes, str]:
        """Compile; where held weights make the kernels spill, they are loaded when they are needed."""
        parameters = self.tile.parameters(self.block, dependent=self.dependent)
        options = nvrtc_options(self.block.outer, self.block.dtype)
        try:
            return compile_cubin(engine, kernel_source("squeeze_excitation", parameters), target, options)
        except SpillError:
            late = kernel_source("squeeze_excitation", {**parameters, "MOST_HELD": 0})
            return compile_cubin(engine, late, target, options)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The first weight as [channels, hidden] and the second as [hidden, channels]; biases in fp32, or None."""
        given = iter(constants)
        found: list[torch.Tensor | None] = []
        for bias in self.block.biases:
            found.append(next(given).detach().flatten(1).t().contiguous())
            found.append(next(given).detach().float().contiguous() if bias else None)
        return tuple(found)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """The first layer's parts, then the rest."""
        block, tile, result = self.block, self.tile, buffers.results[0]
        space = scratch(workspace, self.workspace_bytes)
        if result is None or space is None:
            raise LaunchError("cuda.squeeze_excitation: no tensor was given to write to")
        x, y = dense_nhwc("x", buffers.args[0]), dense_nhwc("y", result)
        residual = dense_nhwc("residual", buffers.args[1]) if block.residual else None
        weight, bias, second, shift = buffers.constants
        parts = as_floats(space, self.workspace_bytes // 4)
        device, grid = x.device.index or 0, tile.parts(block) * block.images
        first = [*map(pointer, (x, weight, parts))]
        self.squeeze.launch(device, grid, tile.threads, first, dependent=self.dependent)
        rest = [*map(pointer, (x, bias, second, shift, parts, residual, y))]
        self.excite.launch(device, grid, tile.threads, rest, dependent=self.dependent)


class SqueezeExcitationEngine(Engine):
    """The block, with the residual and the ReLU behind it; see `squeeze_excitation.cu`."""

    id = "cuda.squeeze_excitation"
    family = "direct"
    devices = ("cuda",)
    trusted = False
    builds_in_threads = True
    fuses_subgraphs = True
    estimates_subgraphs = True

    def fusions(self, graph: Graph) -> Iterable[Sequence[str]]:
        """Each squeeze-and-excitation block."""
        return squeeze_excitations(graph)

    def supports(self, problem: Problem, target: Target) -> Support:
        """Blocks of NHWC images in fp16, bf16 or fp32, on capability 8.0 and newer; channels in multiples of 16 bytes."""
        if not (found := subgraph_support(problem, target, "computes squeeze-and-excitation blocks")):
            return found
        assert isinstance(problem, SubgraphProblem)
        if reason := absence():
            return Support.no(reason)
        block = SqueezeExcitation.of(problem)
        if block is None:
            return Support.no(
                "computes a mean, two 1x1 convolutions with activations and the product with the gate, got another subgraph"
            )
        if not (found := values_support(block.dtype, block.images * block.pixels * block.channels)):
            return found
        multiple = _LOAD_BYTES // DTYPE_BYTES[block.dtype]
        if block.channels % multiple or not 0 < block.channels <= 128 * MOST_PARTS:
            return Support.no(f"needs channels as a multiple of {multiple}, got {block.channels}")
        if not 0 < block.hidden <= MOST_HIDDEN:
            return Support.no(f"needs 1 to {MOST_HIDDEN} channels between the layers, got {block.hidden}")
        if not block.images or not block.pixels:
            return Support.no(f"needs images that are not empty, got {block.images} of {block.pixels} pixels")
        return found

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The configurations, by rising estimated time."""
        block = _known(problem)
        found = dict.fromkeys(tiles(block, target.units))
        return [tile.knobs for tile in sorted(found, key=lambda tile: tile.guess_us(block, target.units))]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The first layer's parts."""
        return GateTile.of(knobs).workspace_bytes(_known(problem))

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """See `GateTile.guess_us`."""
        return GateTile.of(knobs).guess_us(_known(problem), target.units)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile both kernels; needs no GPU."""
        return SqueezeExcitationExecutable(self.id, _known(problem), GateTile.of(knobs), target)


def _known(problem: Problem) -> SqueezeExcitation:
    assert isinstance(problem, SubgraphProblem)
    block = SqueezeExcitation.of(problem)
    assert block is not None
    return block


ENGINE = SqueezeExcitationEngine()
