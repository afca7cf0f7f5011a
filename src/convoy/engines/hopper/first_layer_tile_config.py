"""How the first layer's kernel is cut, what that takes, and how long it may take (docs/kernels/first-layers.md)."""

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
"""Rows of a product."""

SHARED_BYTES: Final = 232448
_SHARED_OF_UNIT: Final = 233472
_BLOCK_BYTES: Final = 1024
"""What a multiprocessor keeps for each block."""

_MOST_WARPGROUPS: Final = {128: 4, 168: 3, 255: 2}
"""Of a multiprocessor, by the registers of a thread."""

_COLUMNS_IN: Final = {144: 128, 192: 168, 256: 255}
"""Columns of a row of products that registers have room for where results are halves."""

_OTHER_REGISTERS: Final = 55
"""Where results are fp32: beside sums, a second row of them where it is pooled, and what a thread brings for the next row."""

MOST_COLUMNS: Final = {False: 256, True: 184}
"""Of a row of products, by whether it is pooled: a thread keeps the largest of three rows then."""

_ROWS: Final = (1, 2, 3, 4, 5, 7, 8)
_WARPGROUPS: Final = (1, 2, 4)
_THREADS: Final = 128
"""Of a warpgroup."""

_CLOCK_GHZ: Final = 1.7
_LINE_CLOCKS: Final = 726.0
"""Of a row of the image before the first product."""

_PRODUCTS: Final = 0.93
_SHARED_CLOCKS: Final = 33.0
_GROUP_CLOCKS: Final = 122.0
_DIVIDED_CLOCKS: Final = 60.0
"""Of eight columns of a row: what warpgroups of a multiprocessor do in turn beside products, what each does for itself, and an
activation that divides."""

_MEMORY_BYTES_NS: Final = 2180.0
_START_NS: Final = 215.0
"""Fitted to 319 timings of 15 layers, batch 1 and 32 (root mean square of the logarithm 0.18): the fastest is always among the
first four. What an activation that divides takes is counted instructions, for it was another then."""


@dataclass(frozen=True, slots=True)
class FirstLayerTile:
    """How the work is cut.

    Attributes:
        rows: of y, that a warpgroup makes.
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
        """Inverse of `knobs`; raises InputError for what no kernel can be made of."""
        form = cls(knobs.integer("rows"), knobs.integer("warpgroups"), bool(knobs["paired"]))
        if not (1 <= form.rows <= 64 and form.warpgroups in _WARPGROUPS) or (form.paired and form.rows % 2):
            raise InputError(
                "knobs", str(knobs), "1 to 64 rows, an even number where they are paired, 1, 2 or 4 warpgroups"
            )
        return form


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a first layer as the kernel sees it.

    Attributes:
        problem: what the engine takes.
        form: how it is cut.
    """

    problem: ConvProblem
    form: FirstLayerTile

    @property
    def pooled(self) -> bool:
        """Whether a pooling follows."""
        return self.problem.epilogue.pool is not None

    @property
    def columns(self) -> int:
        """Of a row of products."""
        return -(-self.problem.q // 8) * 8

    @property
    def value_bytes(self) -> int:
        """Of a value of x and of y."""
        return DTYPE_BYTES[self.problem.x_dtype]

    @property
    def unit_pixels(self) -> int:
        """Of a unit, which is sixteen bytes of four channels a pixel."""
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
        """Of a row of the image, in each of its planes."""
        return self.columns + -(-2 * self.steps // self.phases) - 1

    @property
    def at_once(self) -> int:
        """Rows of y of one product."""
        return 2 if self.form.paired else 1

    @property
    def further(self) -> int:
        """Rows of the image from one row of y to the next of the same product; 0 where there is none."""
        return self.problem.stride_h if self.form.paired else 0

    @property
    def lines(self) -> int:
        """Rows of the image that a product reads."""
        return self.problem.r + self.further

    @property
    def fresh_lines(self) -> int:
        """Rows of the image that the next product needs besides."""
        return self.at_once * self.problem.stride_h

    @property
    def turns(self) -> int:
        """Rows of the convolution that a warpgroup makes, one or two at once."""
        return 2 * self.form.rows + 1 if self.pooled else self.form.rows // self.at_once

    @property
    def ring_bytes(self) -> int:
        """Rows of the image that a warpgroup holds: what one product reads, and what the next needs besides."""
        return (self.lines + self.fresh_lines) * self.phases * self.units * 16

    @property
    def weight_bytes(self) -> int:
        """Of the weight as products read it."""
        return self.lines * self.steps * 2048

    @property
    def shared_bytes(self) -> int:
        """Results that are put together, the weight, rows of the image, and what rounding up costs.

        Products read 32 columns at a time, compute-sanitizer says: as many units as the last ones have too few follow.
        """
        groups = self.columns // 8
        pixels = (-(-groups // 2) if self.pooled else groups) * 8
        each = (pixels * 128 if self.value_bytes == 2 else 0) + self.ring_bytes
        return self.form.warpgroups * each + self.weight_bytes + 128 + -self.columns % 32 * 16

    @property
    def most_warpgroups(self) -> int:
        """That a multiprocessor has registers for."""
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
        """That a multiprocessor has room for."""
        room = _SHARED_OF_UNIT // (self.shared_bytes + _BLOCK_BYTES)
        return max(1, min(room, self.most_warpgroups // self.form.warpgroups))

    @property
    def fits(self) -> bool:
        """Whether there is room for one block, and for the filters twice where they are paired."""
        room = self.shared_bytes <= SHARED_BYTES and self.form.warpgroups <= self.most_warpgroups
        return room and not (self.form.paired and (self.pooled or self.problem.k > FILTERS // 2))

    @property
    def tiles(self) -> int:
        """Of an image."""
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
        """A guess in microseconds: rounds of warpgroups that share a multiprocessor, or the memory's bytes."""
        p, form, groups = self.problem, self.form, self.columns / 8
        warpgroups, room = -(-p.n * self.tiles // units) * form.warpgroups, self.blocks * form.warpgroups
        products = self.lines * self.steps * max(self.columns / 2, 16 + self.columns / 4) * _PRODUCTS
        shared = products + groups * _SHARED_CLOCKS
        divided = _DIVIDED_CLOCKS if p.epilogue.activation in DIVIDING else 0
        row = max(shared * min(warpgroups, room), products + groups * (_GROUP_CLOCKS + divided))
        busy = -(-warpgroups // room) * (self.turns * row + self.lines * _LINE_CLOCKS) / _CLOCK_GHZ
        return (math.hypot(busy, p.bytes_min / _MEMORY_BYTES_NS) + _START_NS) / 1000


def in_slices(weight: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The weight as products read it: [r, steps, 2 units, 8 x 8 filters, pixels, 4 channels], zeros for what is not there.

    Filters that are there twice have their second place a row of y further down.

    Args:
        weight: [k, c, r, s].
        layer: whose weight it is.
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
    """Forms that have room."""
    most = problem.y_spec.shape[2]
    for rows, warpgroups, paired in product(_ROWS, _WARPGROUPS, (False, True)):
        form = FirstLayerTile(rows * 2 if paired else rows, warpgroups, paired)
        if form.rows * warpgroups < most + form.rows and Layer(problem, form).fits:
            yield form
