"""cuda.depthwise_tile: depthwise convolution in half types from a tile in shared memory (docs/kernels/depthwise.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Self

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import checked
from convoy.engines.gpu.gpu_support_checks import conv_support
from convoy.engines.hopper.depthwise_registers import by_taps, one_filter_a_channel, roomiest
from convoy.engines.hopper.hopper_support_checks import hopper_alone
from convoy.engines.hopper.nvrtc_kernel import Function, compile_cubin, pointer
from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, kernel_source, nvrtc_options
from convoy.engines.hopper.tensor_maps import BoxMap
from convoy.engines.tiled_kernel import TiledKernelEngine
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

CHANNELS: Final = 64
"""Channels of a block: two for each lane."""

MOST_TAPS: Final = 49
HELD_TAPS: Final = 25
"""Taps of the largest filter, and of the largest one that registers hold; the weights of others lie in shared memory."""

MOST_FORMS: Final = 24
_PIXEL_BYTES: Final = 128
_SHARED_BYTES: Final = 232448
_SHARED_OF_UNIT: Final = 233472
_BLOCK_BYTES: Final = 1024
"""Shared memory that the device reserves for each block."""

_MOST_IN_BOX: Final = 256
_MOST_WARPS: Final = 16
_MOST_REGISTERS: Final = 240
_REGISTERS_OF_UNIT: Final = 65536

_PARTS: Final = 4
"""Partitions of a multiprocessor; each issues instructions of its own warps."""

_INSTRUCTIONS_NS: Final = 1.14
"""Warp instructions per nanosecond of one partition at 1.7 GHz: two in three clocks. A single warp reaches 1.44 a nanosecond."""

_ALONE_NS: Final = 1.44
_LOAD: Final = 1.9
"""Instructions to load a pixel and convert it to fp32."""

_BYTES_NS: Final = 70.0
"""Bytes per nanosecond into the shared memory of one multiprocessor."""

_MEMORY_BYTES_NS: Final = 2620.0
_ROUND_NS: Final = 87.0
_START_NS: Final = 978.0
"""Time of another round of blocks, and of the launch.

All of these are fitted to 694 timings of 31 layers on an H100 (59d335a), batch 1 and 32 (root mean square of the logarithm
0.11)."""


@dataclass(frozen=True, slots=True)
class DepthwiseSharedTile:
    """A tile configuration of `depthwise_shared.cu`.

    Attributes:
        tile: output rows of a block.
        images: of a block.
        strip: output columns of a warp.
        rows: output rows of a warp.
    """

    tile: int
    images: int
    strip: int
    rows: int

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(tile=self.tile, images=self.images, strip=self.strip, rows=self.rows)

    @classmethod
    def of(cls, knobs: Knobs) -> Self:
        """Inverse of `knobs`; raises InputError for knobs without a valid kernel."""
        form = cls(*(knobs.integer(name) for name in ("tile", "images", "strip", "rows")))
        if min(form.tile, form.images, form.strip, form.rows) < 1:
            raise InputError("knobs", str(knobs), "tile, images, strip and rows of at least 1")
        return form


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a problem's kernel in one configuration."""

    problem: ConvProblem
    form: DepthwiseSharedTile

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Box of one TMA copy: channels, columns, rows, images."""
        p = self.problem
        columns, lines = (p.q - 1) * p.stride_w + p.s, (self.form.tile - 1) * p.stride_h + p.r
        return CHANNELS, columns, lines, self.form.images

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the tile, large filters, the barrier and the alignment of the start."""
        filters = 0 if self.holds_weights else self.taps * CHANNELS * 4
        return math.prod(self.box[1:]) * _PIXEL_BYTES + filters + 16 + 128

    @property
    def taps(self) -> int:
        """Weights of a channel."""
        return self.problem.r * self.problem.s

    @property
    def holds_weights(self) -> bool:
        """Whether registers hold the weights."""
        return self.taps <= HELD_TAPS

    @property
    def warps(self) -> int:
        """Warps of a block."""
        form = self.form
        return form.images * -(-self.problem.q // form.strip) * -(-form.tile // form.rows)

    @property
    def registers(self) -> int:
        """Estimated registers of a thread: sums, a loaded row and its conversion to fp32, weights, addresses."""
        p, seen = self.problem, (self.form.strip - 1) * self.problem.stride_w + self.problem.s
        in_flight = min(-(-p.r // p.stride_h), self.form.rows)
        return 2 * in_flight * self.form.strip + 3 * seen + (2 * self.taps if self.holds_weights else 8) + 30

    @property
    def block_registers(self) -> int:
        """Registers of a block; the device allocates them for four warps at a time."""
        return 128 * -(-self.warps // 4) * self.registers

    @property
    def blocks(self) -> int:
        """Blocks that fit on a multiprocessor."""
        room = _SHARED_OF_UNIT // (self.shared_bytes + _BLOCK_BYTES)
        return max(1, min(room, 32, _REGISTERS_OF_UNIT // self.block_registers))

    @property
    def fits(self) -> bool:
        """Whether one block fits on a multiprocessor."""
        rooms = self.shared_bytes <= _SHARED_BYTES and self.registers <= _MOST_REGISTERS
        threads = self.warps <= _MOST_WARPS and self.block_registers <= _REGISTERS_OF_UNIT
        return rooms and threads and max(self.box) <= _MOST_IN_BOX

    @property
    def grid(self) -> int:
        """Blocks along channels, rows and images."""
        p = self.problem
        return -(-p.c // CHANNELS) * -(-p.p // self.form.tile) * -(-p.n // self.form.images)

    def map(self) -> BoxMap:
        """The TMA descriptor of x."""
        n, c, h, w = self.problem.x_spec.shape
        return BoxMap((c, w, h, n), (c * 2, w * c * 2, h * w * c * 2), self.box, swizzled=False)

    def parameters(self, blocks: int) -> dict[str, int]:
        """The values of `depthwise_shared_config.cuh`, for `blocks` blocks per multiprocessor."""
        p, form = self.problem, self.form
        return {
            "BFLOAT": int(p.x_dtype == "bf16"), "Y_CHANNELS": p.c, "Y_ROWS": p.p, "Y_COLUMNS": p.q, "FILTER_R": p.r,
            "FILTER_S": p.s, "STRIDE_H": p.stride_h, "STRIDE_W": p.stride_w, "PAD_H": p.pad_h, "PAD_W": p.pad_w,
            "BATCH": p.n, "LANE_CHANNELS": 2, "TILE_ROWS": form.tile, "TILE_IMAGES": form.images, "STRIP": form.strip,
            "BAND_ROWS": form.rows, "HAS_BIAS": int(p.epilogue.bias), "HAS_RESIDUAL": int(p.epilogue.residual),
            "ACTIVATION": ACTIVATIONS.index(p.epilogue.activation), "MIN_BLOCKS_PER_SM": blocks,
        }  # fmt: skip

    def guess_us(self, units: int) -> float:
        """Estimated time in microseconds: instructions, copies and memory traffic, which partly overlap.

        Each round of blocks adds the time of one warp.
        """
        p, form = self.problem, self.form
        seen = (form.strip - 1) * p.stride_w + p.s
        loads = ((form.rows - 1) * p.stride_h + p.r) * seen
        instructions = 2 * form.rows * form.strip * self.taps + _LOAD * loads
        if not self.holds_weights:  # each input row loads the weights of all filter rows that it meets
            instructions += min(form.rows, -(-p.r // p.stride_h)) * (loads / seen) * p.s
        blocks, rounds = -(-self.grid // units), -(-self.grid // (units * self.blocks))
        busy = blocks * self.warps * instructions / (_PARTS * _INSTRUCTIONS_NS)
        hidden = math.hypot(busy, blocks * self.shared_bytes / _BYTES_NS, p.bytes_min / _MEMORY_BYTES_NS)
        return (hidden + rounds * (_ROUND_NS + instructions / _ALONE_NS) + _START_NS) / 1000


def forms(problem: ConvProblem, units: int) -> list[DepthwiseSharedTile]:
    """Configurations that fit, by rising estimate."""
    return sorted(_candidates(problem), key=lambda form: Tile(problem, form).guess_us(units))[:MOST_FORMS]


def _candidates(problem: ConvProblem) -> Iterator[DepthwiseSharedTile]:
    tiles = sorted({min(rows, problem.p) for rows in (1, 2, 4, 7, 8, 14, 28)})
    for tile, images, strip, rows in product(tiles, (1, 2, 4), (2, 4, 7, 8), (1, 2, 4, 7, 14)):
        form = DepthwiseSharedTile(tile, images, strip, rows)
        whole = images == 1 or (tile == problem.p and images <= problem.n)
        if whole and rows <= tile and strip < 2 * problem.q and Tile(problem, form).fits:
            yield form


class DepthwiseTileExecutable(Executable):
    """The kernel of one tile configuration for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, form: DepthwiseSharedTile, target: Target) -> None:
        self.problem, self.tile = problem, Tile(problem, form)
        if not self.tile.fits:
            raise InputError(
                "knobs", str(form.knobs), f"a smaller tile: {self.tile.shared_bytes} bytes of shared memory"
            )
        cubin, self.log = roomiest(lambda blocks: self._compiled_for(blocks, engine, target), self.tile.blocks, 1)
        self.function = Function(engine, cubin, "depthwise_shared", self.tile.shared_bytes)

    def _compiled_for(self, blocks: int, engine: str, target: Target) -> tuple[bytes, str]:
        source = kernel_source("depthwise_shared", self.tile.parameters(blocks))
        options = nvrtc_options(self.problem.epilogue.activation, self.problem.x_dtype)
        return compile_cubin(engine, source, target, options)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as fp32 [r·s, c], and the bias."""
        return by_taps(constants)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Launch the kernel; an empty batch needs none."""
        del workspace
        if not self.problem.n:
            return
        x, y, residual = checked(buffers, self.problem.epilogue.residual)
        weight, bias = buffers.constants[0], buffers.constants[1] if self.problem.epilogue.bias else None
        arguments = [self.tile.map().encode(self.problem.x_dtype, x), *map(pointer, (weight, y, residual, bias))]
        threads = 32 * self.tile.warps
        self.function.launch(x.device.index or 0, self.tile.grid, threads, arguments, dependent=True)


class DepthwiseTileEngine(TiledKernelEngine[DepthwiseSharedTile]):
    """A tile of the image in shared memory by one TMA copy, sums in registers; see `depthwise_shared.cu`."""

    id = "cuda.depthwise_tile"
    family = "direct"
    devices = ("cuda",)
    trusted = False
    builds_in_threads = True
    quick_settings = 8
    tile_config = DepthwiseSharedTile

    def supports(self, problem: Problem, target: Target) -> Support:
        """As many groups as channels, a multiple of 8, in fp16 or bf16 on Hopper; at most 49 taps, no dilation."""
        if not (found := conv_support(problem, target, 90)) or not (found := hopper_alone(target)):
            return found
        assert isinstance(problem, ConvProblem)
        if problem.x_dtype not in ("fp16", "bf16"):
            return Support.no(f"needs fp16 or bf16, got {problem.x_dtype}")
        if not (found := one_filter_a_channel(problem, 8, MOST_TAPS)):
            return found
        if not any(True for _ in _candidates(problem)):
            return Support.no(
                f"a row of {problem.q} results and the pixels that it reads do not fit into shared memory"
            )
        return Support.yes()

    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[DepthwiseSharedTile]:
        """See `forms` above."""
        return forms(problem, units)

    def estimate_tile_us(self, problem: ConvProblem, form: DepthwiseSharedTile, units: int) -> float:
        """See `Tile.guess_us`."""
        return Tile(problem, form).guess_us(units)

    def build_tile(self, problem: ConvProblem, form: DepthwiseSharedTile, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return DepthwiseTileExecutable(self.id, problem, form, target)


ENGINE = DepthwiseTileEngine()
