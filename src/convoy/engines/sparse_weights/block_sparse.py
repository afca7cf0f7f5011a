"""pruned.blocks: convolutions whose weights have blocks of zeros, on tensor cores (docs/kernels/sparse-weights.md).

    y = activation(conv(x, weight) + bias + residual)    -->    an implicit GEMM over the blocks that are not zero

A block is one tap and eight channels. The engine pays where many filters share their zero blocks: 64 filters and more by 8
channels and more (for filters larger than 1x1, at each tap), or dead channels. Values may change under one mask; `pack`
refuses a weight with a value where the mask has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, fits_tma, pitch_of
from convoy.engines.hopper.nvrtc_kernel import Function, absence, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, kernel_source, reciprocal, wgmma_function
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.mask_check import check_zeros
from convoy.engines.sparse_weights.mask_support_checks import hopper_convolution
from convoy.engines.sparse_weights.weight_blocks import Lists, fits, lengths, live_share
from convoy.engines.tiled_kernel import TiledKernelEngine
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target
from convoy.typed_torch import from_numpy

MOST_LIVE: Final = 0.6
"""Largest share of blocks that tiles of 64 filters may read: gathering costs more than copies of whole boxes."""

SHARED_BYTES: Final = 232448
MOST_STAGES: Final = 8
_ROW_BYTES: Final = 128
_EXTRA_BYTES: Final = 1024

REGISTERS: Final = {1: (96, 232), 2: (72, 216)}
"""Registers of a gathering and of a multiplying thread, by the number of multiplying warpgroups."""

MOST_SUMS: Final = {1: 192, 2: 128}
"""Sums of a thread, by the number of multiplying warpgroups."""

_TORCH: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_CLOCK_GHZ: Final = 1.7
_LOAD_BYTES_NS: Final = 7400.0
_LOAD_BYTES_NS_PER_SM: Final = 60.0
_GATHER_CLOCKS: Final = 18.0
_STEP_CLOCKS: Final = 60.0
_STORE_BYTES_NS_PER_SM: Final = 20.0
_MEMORY_BYTES_NS: Final = 2900.0
_START_NS: Final = 3200.0


@dataclass(frozen=True, slots=True)
class BlockSparseTile:
    """How the work is cut.

    Attributes:
        rows: filters of a multiplying warpgroup, 64 or 128.
        pixels: of a tile, a multiple of 16.
        stages: depth of the ring.
        consumers: multiplying warpgroups.
    """

    rows: int
    pixels: int
    stages: int
    consumers: int

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(**{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def of(cls, knobs: Knobs) -> BlockSparseTile:
        """Inverse of `knobs`; raises InputError for knobs that name no valid configuration."""
        config = cls(**{name: knobs.integer(name) for name in cls.__slots__})
        right = config.rows in (64, 128) and config.consumers in REGISTERS
        if not right or not 0 < config.pixels <= 256 or config.pixels % 16 or not 3 <= config.stages <= MOST_STAGES:
            raise InputError(
                "knobs", str(knobs), "rows of 64 or 128, pixels up to 256, 1 or 2 consumers, 3 to 8 stages"
            )
        return config

    @property
    def filters(self) -> int:
        """Of a tile."""
        return self.rows * self.consumers

    @property
    def stage_bytes(self) -> int:
        """Both operands of one iteration."""
        return (self.pixels + self.filters) * _ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """The ring, its barriers, and what rounding its start up costs."""
        return self.stages * (self.stage_bytes + 16) + _EXTRA_BYTES

    def parameters(self, problem: ConvProblem) -> dict[str, int]:
        """Values of `igemm/igemm_swap_ab_config.cuh`; the others keep their defaults."""
        fewer, more = REGISTERS[self.consumers]
        epilogue = problem.epilogue
        return {
            "WARPGROUP_M": self.rows, "TILE_N": self.pixels, "STAGES": self.stages, "CONSUMERS": self.consumers,
            "BFLOAT": int(problem.x_dtype == "bf16"), "HAS_BIAS": int(epilogue.bias),
            "HAS_RESIDUAL": int(epilogue.residual), "ACTIVATION": ACTIVATIONS.index(epilogue.activation),
            "PRODUCER_REGISTERS": fewer, "CONSUMER_REGISTERS": more,
        }  # fmt: skip

    def tiles(self, problem: ConvProblem) -> tuple[int, int]:
        """Tiles along pixels and filters."""
        return -(-problem.n * problem.p * problem.q // self.pixels), -(-problem.k // self.filters)

    def units(self, problem: ConvProblem) -> int:
        """All tiles."""
        along_pixels, along_filters = self.tiles(problem)
        return along_pixels * along_filters

    def sizes(self, problem: ConvProblem, pitch: int) -> dict[str, int]:
        """The kernel's run-time sizes, in the order of its structure."""
        sizes = {
            "pixels": problem.n * problem.p * problem.q, "k": problem.k, "pitch": pitch, "q": problem.q,
            "pq": problem.p * problem.q, "h": problem.h, "w": problem.w, "c": problem.c,
            "units": self.units(problem), "tiles": self.tiles(problem)[0], "stride_h": problem.stride_h,
            "stride_w": problem.stride_w, "pad_h": problem.pad_h, "pad_w": problem.pad_w,
        }  # fmt: skip
        for name in ("q", "pq", "tiles"):
            sizes[f"{name}_factor"], sizes[f"{name}_shift"] = reciprocal(sizes[name])
        return sizes


def estimate_us(problem: ConvProblem, config: BlockSparseTile, units: int) -> float:
    """Estimated microseconds: a multiprocessor's products, loads, or gathers with stores, or the memory's bytes."""
    assert problem.mask is not None
    work = config.units(problem)
    active = min(work, units)
    products = config.filters / 64 * 4 * max(config.pixels / 2, config.pixels / 4 + 16) / _CLOCK_GHZ
    loads = (config.filters + config.pixels) * _ROW_BYTES / min(_LOAD_BYTES_NS_PER_SM, _LOAD_BYTES_NS / active)
    gathers = (config.pixels / 16 * _GATHER_CLOCKS + _STEP_CLOCKS) / _CLOCK_GHZ
    step = max(products, loads, gathers)
    store = config.filters * config.pixels * 2 / _STORE_BYTES_NS_PER_SM
    found = lengths(problem.mask, config.filters)
    total = (sum(found) * step + len(found) * store) * config.tiles(problem)[0]
    busy = max(total / active, found[0] * step + store, -(-work // active) * store)
    memory = problem.bytes_min / _MEMORY_BYTES_NS
    return (max(busy, memory) + 0.1 * min(busy, memory) + _START_NS) / 1000


def tile_configs(problem: ConvProblem, units: int, limit: int = 16) -> list[BlockSparseTile]:
    """Tile configurations worth trying, by rising estimated time."""
    found = [(estimate_us(problem, config, units), index, config) for index, config in enumerate(_candidates(problem))]
    return [config for _, _, config in sorted(found, key=lambda entry: entry[:2])][:limit]


def _candidates(problem: ConvProblem) -> Iterator[BlockSparseTile]:
    total = problem.n * problem.p * problem.q
    for rows, consumers in ((64, 1), (64, 2), (128, 1), (128, 2)):
        filters = rows * consumers
        if filters > 64 and filters >= problem.k + 64:
            continue
        for pixels in (32, 48, 64, 96, 128, 160, 192, 224, 256):
            if rows // 64 * pixels // 2 > MOST_SUMS[consumers] or pixels >= total + 48:
                continue
            shallow = BlockSparseTile(rows, pixels, 3, consumers)
            stages = min(MOST_STAGES, (SHARED_BYTES - _EXTRA_BYTES) // (shallow.stage_bytes + 16))
            if stages >= 3:
                yield BlockSparseTile(rows, pixels, stages, consumers)


class BlocksExecutable(Executable):
    """One tile configuration for one problem."""

    def __init__(self, problem: ConvProblem, config: BlockSparseTile, target: Target) -> None:
        assert problem.mask is not None
        self.problem, self.config, self.units = problem, config, target.units
        products = wgmma_function(config.pixels, problem.x_dtype)
        source = kernel_source("block_sparse", config.parameters(problem), products)
        cubin, self.log = compile_cubin(BlockSparseEngine.id, source, target)
        self.function = Function(BlockSparseEngine.id, cubin, "block_sparse", config.shared_bytes)
        self._mask = from_numpy(positions(problem.mask))
        self.lists = Lists(problem, config.filters)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Weights in the order of the lists, the lists, the bias as it is."""
        weight = constants[0].detach()
        check_zeros(weight, self._mask)
        told = (self.lists.tiles.to(weight.device), self.lists.blocks.to(weight.device))
        return (self.lists.pack(weight), *told, *(bias.detach().contiguous() for bias in constants[1:]))

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Where the slice keeps to sixteen bytes."""
        return fits_tma(_TORCH[self.problem.y_dtype], pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        problem, config = self.problem, self.config
        x, y, residual = checked(buffers, problem.epilogue.residual, slices=True)
        weight, tiles, blocks, *bias = buffers.constants
        arguments = [
            pointer(x), pointer(tiles), pointer(blocks), pointer(weight), pointer(y), pointer(residual),
            pointer(bias[0] if problem.epilogue.bias else None), structure("Sizes", config.sizes(problem, pitch_of(y))),
        ]  # fmt: skip
        blocks = min(config.units(problem), self.units)
        self.function.launch(x.device.index or 0, blocks, 128 * (config.consumers + 1), arguments, dependent=True)


class BlockSparseEngine(TiledKernelEngine[BlockSparseTile]):
    """Implicit GEMM over lists of blocks; see `hopper/blocks.cu`."""

    id = "pruned.blocks"
    family = "implicit_gemm"
    devices = ("cuda",)
    writes_slices = True
    trusted = False
    reads_mask = True
    tile_config = BlockSparseTile

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions on Hopper in fp16 or bf16 and NHWC, c and k multiples of 8, with enough blocks of zeros."""
        if not (support := hopper_convolution(problem, target)):
            return support
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        if not fits(problem):
            return Support.no(
                f"needs a filter that spans at most 255 pixels and at most 32768 channels, got c = {problem.c}"
            )
        if (share := live_share(problem.mask, 64)) > MOST_LIVE:
            zeros = "needs zeros in whole blocks of 8 channels at one filter tap in 64 filters"
            return Support.no(f"{zeros}; {share:.0%} of such blocks are not zero")
        return Support.no(absence()) if absence() else Support.yes()

    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[BlockSparseTile]:
        """See the function of this name."""
        return tile_configs(problem, units)

    def estimate_tile_us(self, problem: ConvProblem, config: BlockSparseTile, units: int) -> float:
        """See `estimate_us` above."""
        return estimate_us(problem, config, units)

    def build_tile(self, problem: ConvProblem, config: BlockSparseTile, target: Target) -> Executable:
        """Compile one tile configuration; needs no GPU."""
        return BlocksExecutable(problem, config, target)


ENGINE = BlockSparseEngine()
