"""FirstLayerTile: how `first_layer.cu` tiles a layer, its resources, and its cost model (docs/kernels/first-layers.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final, Self

import torch

from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, DIVIDING
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs
from convoy.problem.spec import DTYPE_BYTES

MOST_CHANNELS: Final = 4
FILTERS: Final = 64
"""Rows of a matrix product."""

SHARED_BYTES: Final = 232448
_SHARED_OF_UNIT: Final = 233472
_BLOCK_BYTES: Final = 1024
"""Shared memory that the device reserves for each block."""

_MOST_WARPGROUPS: Final = {128: 4, 168: 3, 255: 2}
"""Most warpgroups of a multiprocessor, by the registers of a thread."""

_COLUMNS_IN: Final = {144: 128, 192: 168, 256: 255}
"""Columns of a row of products that the registers hold if results are half types."""

_OTHER_REGISTERS: Final = 55
"""Registers for fp32 results besides sums: a second row of sums if it is pooled, and values loaded ahead for the next row."""

MOST_COLUMNS: Final = {False: 256, True: 184}
"""Most columns of a row of products, by whether it is pooled: a thread then keeps the largest of three rows."""

_ROWS: Final = (1, 2, 3, 4, 5, 7, 8)
_WARPGROUPS: Final = (1, 2, 4)
_THREADS: Final = 128
"""Threads of a warpgroup."""

_CLOCK_GHZ: Final = 1.7
_LINE_CLOCKS: Final = 726.0
"""Clocks to load one row of the image before the first product."""

_PRODUCTS: Final = 0.93
_SHARED_CLOCKS: Final = 33.0
_GROUP_CLOCKS: Final = 122.0
_DIVIDED_CLOCKS: Final = 60.0
"""Clocks for eight columns of a row: the part in which a multiprocessor's warpgroups take turns beside products, the part that
each does by itself, and an activation with a division."""

_MEMORY_BYTES_NS: Final = 2180.0
_START_NS: Final = 215.0
"""Fitted to 319 timings of 15 layers, batch 1 and 32 (root mean square of the logarithm 0.18): the fastest is always among the
first four. The clocks of an activation with a division are counted instructions, because that code changed after the fit."""


@dataclass(frozen=True, slots=True)
class FirstLayerTile:
    """A tile configuration of `first_layer.cu`.

    Attributes:
        rows: of y, that a warpgroup computes.
        warpgroups: of a block.
        paired: whether a product has the filters twice, for two rows of y.
    """

    rows: int
    warpgroups: int
    paired: bool = False

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(rows=self.rows, warpgroups=self.warpgroups, paired=self.paired)

    @classmethod
    def of(cls, knobs: Knobs) -> Self:
        """Inverse of `knobs`; raises InputError for knobs without a valid kernel."""
        form = cls(knobs.integer("rows"), knobs.integer("warpgroups"), bool(knobs["paired"]))
        if not (1 <= form.rows <= 64 and form.warpgroups in _WARPGROUPS) or (form.paired and form.rows % 2):
            raise InputError(
                "knobs", str(knobs), "1 to 64 rows, an even number where they are paired, 1, 2 or 4 warpgroups"
            )
        return form


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a first layer for the kernel.

    Attributes:
        problem: that the engine got.
        form: the tile configuration.
    """

    problem: ConvProblem
    form: FirstLayerTile

    @property
    def pooled(self) -> bool:
        """Whether a pooling follows."""
        return self.problem.epilogue.pool is not None

    @property
    def columns(self) -> int:
        """Columns of a row of products."""
        return -(-self.problem.q // 8) * 8

    @property
    def value_bytes(self) -> int:
        """Bytes of a value of x and of y."""
        return DTYPE_BYTES[self.problem.x_dtype]

    @property
    def unit_pixels(self) -> int:
        """Pixels of a unit, which is sixteen bytes with four channels for each pixel."""
        return 4 // self.value_bytes

    @property
    def phases(self) -> int:
        """Units from one window to the next."""
        return self.problem.stride_w // self.unit_pixels

    @property
    def steps(self) -> int:
        """Pairs of units of a row of the filter."""
        return -(-self.problem.s // (2 * self.unit_pixels))

    @property
    def units(self) -> int:
        """Units of a row of the image, in each of its planes."""
        return self.columns + -(-2 * self.steps // self.phases) - 1

    @property
    def at_once(self) -> int:
        """Rows of y that one product computes."""
        return 2 if self.form.paired else 1

    @property
    def further(self) -> int:
        """Image rows from one row of y to the next of the same product; 0 if the product has one row."""
        return self.problem.stride_h if self.form.paired else 0

    @property
    def lines(self) -> int:
        """Image rows that a product reads."""
        return self.problem.r + self.further

    @property
    def fresh_lines(self) -> int:
        """Image rows that the next product reads and this one does not."""
        return self.at_once * self.problem.stride_h

    @property
    def turns(self) -> int:
        """Rows of the convolution that a warpgroup computes, in steps of one or two."""
        return 2 * self.form.rows + 1 if self.pooled else self.form.rows // self.at_once

    @property
    def ring_bytes(self) -> int:
        """Bytes of the image rows that a warpgroup holds: those of one product, and the new ones of the next."""
        return (self.lines + self.fresh_lines) * self.phases * self.units * 16

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight in the layout of `in_slices`."""
        return self.lines * self.steps * 2048

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: results in transit, the weight, rows of the image, alignment.

        Products read 32 columns at a time, as compute-sanitizer shows, so units that the last columns lack must follow.
        """
        groups = self.columns // 8
        pixels = (-(-groups // 2) if self.pooled else groups) * 8
        each = (pixels * 128 if self.value_bytes == 2 else 0) + self.ring_bytes
        return self.form.warpgroups * each + self.weight_bytes + 128 + -self.columns % 32 * 16

    @property
    def most_warpgroups(self) -> int:
        """Warpgroups that a multiprocessor has registers for."""
        return next(most for registers, most in _MOST_WARPGROUPS.items() if self._registers <= registers)

    @property
    def _registers(self) -> int:
        if self.value_bytes == 2:
            return next(registers for columns, registers in _COLUMNS_IN.items() if self.columns <= columns)
        items = -(-self.fresh_lines * self.problem.w // _THREADS)
        sums = self.columns // 2 * (2 if self.pooled else 1)
        return min(sums + items * self.problem.c + _OTHER_REGISTERS, max(_MOST_WARPGROUPS))

    @property
    def blocks(self) -> int:
        """Blocks that fit on a multiprocessor."""
        room = _SHARED_OF_UNIT // (self.shared_bytes + _BLOCK_BYTES)
        return max(1, min(room, self.most_warpgroups // self.form.warpgroups))

    @property
    def fits(self) -> bool:
        """Whether one block fits on a multiprocessor, and its filters twice if they are paired."""
        room = self.shared_bytes <= SHARED_BYTES and self.form.warpgroups <= self.most_warpgroups
        return room and not (self.form.paired and (self.pooled or self.problem.k > FILTERS // 2))

    @property
    def tiles(self) -> int:
        """Tiles of an image."""
        return -(-self.problem.y_spec.shape[2] // (self.form.rows * self.form.warpgroups))

    def parameters(self) -> dict[str, int]:
        """The values of `first_layer_config.cuh`."""
        p, pool = self.problem, self.problem.epilogue.pool
        _, _, y_rows, y_columns = p.y_spec.shape
        return {
            "VALUE_BYTES": self.value_bytes, "X_CHANNELS": p.c, "X_ROWS": p.h, "X_COLUMNS": p.w, "FILTERS": p.k,
            "FILTER_ROWS": self.lines, "STRIDE_H": self.fresh_lines, "PHASES": self.phases, "PAD_H": p.pad_h,
            "PAD_W": p.pad_w, "CONV_P": p.p, "CONV_Q": p.q, "TILE_N": self.columns, "STEPS": self.steps,
            "CHUNKS": self.units, "PAIRED": int(self.form.paired), "POOLED": int(self.pooled),
            "POOL_PAD": pool.pad_h if pool else 0, "Y_ROWS": y_rows, "Y_COLUMNS": y_columns,
            "WARPGROUP_ROWS": self.form.rows, "WARPGROUPS": self.form.warpgroups, "MIN_BLOCKS_PER_SM": self.blocks,
            "TILES": self.tiles, "PIXEL_PAIRS_ALIGNED": int(p.w % 2 == 0), "BFLOAT": int(p.x_dtype == "bf16"),
            "HAS_BIAS": int(p.epilogue.bias), "ACTIVATION": ACTIVATIONS.index(p.epilogue.activation),
        }  # fmt: skip

    def guess_us(self, units: int) -> float:
        """Estimated time in microseconds: rounds of warpgroups that share a multiprocessor, or the memory traffic."""
        p, form, groups = self.problem, self.form, self.columns / 8
        warpgroups, room = -(-p.n * self.tiles // units) * form.warpgroups, self.blocks * form.warpgroups
        products = self.lines * self.steps * max(self.columns / 2, 16 + self.columns / 4) * _PRODUCTS
        shared = products + groups * _SHARED_CLOCKS
        divided = _DIVIDED_CLOCKS if p.epilogue.activation in DIVIDING else 0
        row = max(shared * min(warpgroups, room), products + groups * (_GROUP_CLOCKS + divided))
        busy = -(-warpgroups // room) * (self.turns * row + self.lines * _LINE_CLOCKS) / _CLOCK_GHZ
        return (math.hypot(busy, p.bytes_min / _MEMORY_BYTES_NS) + _START_NS) / 1000


def in_slices(weight: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The weight in the layout of the products: [r, steps, 2 units, 8 x 8 filters, pixels, 4 channels], padded with zeros.

    Paired filters are shifted by one row of y in their second copy.

    Args:
        weight: [k, c, r, s].
        layer: sizes of the layer.
    """
    pad = torch.nn.functional.pad
    if layer.further:
        own = pad(weight, (0, 0, 0, 0, 0, 0, 0, FILTERS // 2 - len(weight)))
        weight = torch.cat([pad(own, (0, 0, 0, layer.further)), pad(own, (0, 0, layer.further, 0))])
    k, c, r, s = weight.shape
    columns = 2 * layer.unit_pixels * layer.steps
    whole = pad(weight, (0, columns - s, 0, 0, 0, MOST_CHANNELS - c, 0, FILTERS - k))
    parts = whole.reshape(8, 8, MOST_CHANNELS, r, layer.steps, 2, layer.unit_pixels)
    return parts.permute(3, 4, 5, 0, 1, 6, 2).contiguous()


def forms(problem: ConvProblem) -> Iterator[FirstLayerTile]:
    """Configurations that fit."""
    most = problem.y_spec.shape[2]
    for rows, warpgroups, paired in product(_ROWS, _WARPGROUPS, (False, True)):
        form = FirstLayerTile(rows * 2 if paired else rows, warpgroups, paired)
        if form.rows * warpgroups < most + form.rows and Layer(problem, form).fits:
            yield form
