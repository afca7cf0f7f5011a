"""cuda.first_layer: the first layer and the pooling behind it in one launch (docs/kernels/cuda_first_layer.md)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Self

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.cuda.compiled import Function, compile_cubin, pointer
from convoy.engines.cuda.requirements import hopper_alone
from convoy.engines.cuda.source import ACTIVATIONS, DIVIDING, first_source, options
from convoy.engines.formed import FormedEngine
from convoy.engines.triton.pooled import unpooled
from convoy.engines.triton.requirements import first_layer_support
from convoy.engines.triton.tensors import checked, fits_tma, pitch_of
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

MOST_CHANNELS: Final = 4
FILTERS: Final = 64
"""Rows of a product."""

SHARED_BYTES: Final = 232448
_SHARED_OF_UNIT: Final = 233472
_BLOCK_BYTES: Final = 1024
"""What a multiprocessor keeps for each block."""

_MOST_WARPGROUPS: Final = {144: 4, 192: 3, 256: 2}
"""Of a multiprocessor, by the columns of a row of products: a thread has 128, 168 or 255 registers then."""

_MOST_COLUMNS: Final = {False: 256, True: 184}
"""Of a row of products, by whether it is pooled: a thread keeps the largest of three rows then."""

_MONOTONE: Final = ("none", "relu", "relu6")
"""Activations of a largest value that are the largest of the activations."""

_TYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ROWS: Final = (1, 2, 3, 4, 5, 7, 8)
_WARPGROUPS: Final = (1, 2, 4)

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
class Form:
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
    form: Form

    @property
    def pooled(self) -> bool:
        """Whether a pooling follows."""
        return self.problem.epilogue.pool is not None

    @property
    def columns(self) -> int:
        """Of a row of products."""
        return -(-self.problem.q // 8) * 8

    @property
    def phases(self) -> int:
        """Units of two pixels from one window to the next."""
        return self.problem.stride_w // 2

    @property
    def steps(self) -> int:
        """Pairs of units of a row of the filter."""
        return -(-self.problem.s // 4)

    @property
    def units(self) -> int:
        """Of a row of the image, in each of its planes."""
        return self.columns + 2 * self.steps // self.phases - 1

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
        each = pixels * 128 + self.ring_bytes
        return self.form.warpgroups * each + self.weight_bytes + 128 + -self.columns % 32 * 16

    @property
    def most_warpgroups(self) -> int:
        """That a multiprocessor has registers for."""
        return next(most for columns, most in _MOST_WARPGROUPS.items() if self.columns <= columns)

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

    def macros(self) -> dict[str, int]:
        """The kernel's settings."""
        p, pool = self.problem, self.problem.epilogue.pool
        _, _, y_rows, y_columns = p.y_spec.shape
        return {
            "C": p.c, "H": p.h, "W": p.w, "K": p.k, "R": self.lines, "STRIDE_H": self.fresh_lines, "PHASES": self.phases,
            "PAD_H": p.pad_h, "PAD_W": p.pad_w, "P": p.p, "Q": p.q, "BN": self.columns, "STEPS": self.steps,
            "UNITS": self.units, "PAIRED": int(self.form.paired), "POOLED": int(self.pooled),
            "POOL_PAD": pool.pad_h if pool else 0, "Y_ROWS": y_rows, "Y_COLUMNS": y_columns, "ROWS": self.form.rows,
            "WARPGROUPS": self.form.warpgroups, "BLOCKS": self.blocks, "TILES": self.tiles, "PAIRS_READ": int(p.w % 2 == 0),
            "BF16": int(p.x_dtype == "bf16"), "BIAS": int(p.epilogue.bias),
            "ACTIVATION": ACTIVATIONS.index(p.epilogue.activation),
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


def in_slices(weight: torch.Tensor, steps: int, further: int = 0) -> torch.Tensor:
    """The weight as products read it: [r, steps, 2 units, 8 x 8 filters, 2 pixels, 4 channels], zeros for what is not there.

    Args:
        weight: [k, c, r, s].
        steps: pairs of units of a row of the filter.
        further: for filters that are there twice: rows of the image from one row of y to the next.
    """
    if further:
        k, _, r, _ = weight.shape
        own = weight.new_zeros(FILTERS // 2, *weight.shape[1:])
        own[:k] = weight
        pad = torch.nn.functional.pad
        weight = torch.cat([pad(own, (0, 0, 0, further)), pad(own, (0, 0, further, 0))])
    k, c, r, s = weight.shape
    whole = torch.nn.functional.pad(weight, (0, 4 * steps - s, 0, 0, 0, MOST_CHANNELS - c, 0, FILTERS - k))
    parts = whole.reshape(8, 8, MOST_CHANNELS, r, steps, 2, 2)
    return parts.permute(3, 4, 5, 0, 1, 6, 2).contiguous()


class FirstLayerExecutable(Executable):
    """One form for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, form: Form, target: Target) -> None:
        self.problem, self.layer = problem, Layer(problem, form)
        if not self.layer.fits:
            raise InputError(
                "knobs", str(form.knobs), f"fewer warpgroups: {self.layer.shared_bytes} bytes of shared memory"
            )
        text = first_source(self.layer.macros(), problem.x_dtype)
        cubin, self.log = compile_cubin(engine, text, target, options(problem.epilogue.activation, problem.x_dtype))
        self.function = Function(engine, cubin, "first_layer", self.layer.shared_bytes)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """See `in_slices`; the bias as it is."""
        weight = in_slices(constants[0].detach(), self.layer.steps, self.layer.further)
        return (weight, *(bias.detach().contiguous() for bias in constants[1:]))

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Where the slice keeps to sixteen bytes."""
        return fits_tma(_TYPES[self.problem.y_dtype], pitch, offset)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch; none for a batch of no images."""
        del workspace
        if not self.problem.n:
            return
        x, y, _ = checked(buffers, residual=False, slices=True)
        bias = buffers.constants[1] if self.problem.epilogue.bias else None
        arguments = [
            pointer(x), pointer(buffers.constants[0]), pointer(y), pointer(bias), ctypes.c_int(pitch_of(y))
        ]  # fmt: skip
        grid, threads = self.problem.n * self.layer.tiles, 128 * self.layer.form.warpgroups
        self.function.launch(x.device.index or 0, grid, threads, arguments, dependent=True)


class FirstLayerEngine(FormedEngine[Form]):
    """Windows that overlap in shared memory, and a maximum in registers; see `first.cu`."""

    id = "cuda.first_layer"
    version = 1
    family = "implicit_gemm"
    trusted = False
    quick_settings = 4
    form = Form

    def supports(self, problem: Problem, target: Target) -> Support:
        """First layers of up to 4 channels and 64 filters on Hopper in half types, with a maximum of 3x3 behind or none."""
        base = unpooled(problem) if isinstance(problem, ConvProblem) and problem.epilogue.pool else problem
        found = first_layer_support(base, target, MOST_CHANNELS, empty=True)
        if not found or not (found := hopper_alone(target)):
            return found
        assert isinstance(problem, ConvProblem)
        if problem.x_dtype not in _TYPES:
            return Support.no(f"needs fp16 or bf16, got {problem.x_dtype}")
        if problem.epilogue.residual:
            return Support.no("adds no residual")
        if problem.stride_w not in (2, 4):
            return Support.no(f"needs a stride of 2 or 4 along the width, got {problem.stride_w}")
        if problem.k > FILTERS or problem.k % 8:
            return Support.no(f"needs at most {FILTERS} filters, a multiple of 8, got {problem.k}")
        pool = problem.epilogue.pool
        if problem.q > _MOST_COLUMNS[pool is not None]:
            return Support.no(f"has room for rows of {_MOST_COLUMNS[pool is not None]} results, got {problem.q}")
        if pool is not None:
            sizes = (pool.kind, pool.window_h, pool.window_w, pool.stride_h, pool.stride_w)
            if sizes != ("max", 3, 3, 2, 2) or pool.pad_h != pool.pad_w:
                return Support.no(f"pools by the largest of 3x3 with stride 2 and one padding, got {pool}")
            if problem.epilogue.activation not in _MONOTONE:
                return Support.no(f"pools behind {', '.join(_MONOTONE)}, got {problem.epilogue.activation}")
        if not Layer(problem, Form(1, 1)).fits:
            return Support.no("has no room for the weight and the rows of the image that a row reads")
        return Support.yes()

    def forms(self, problem: ConvProblem, units: int) -> Sequence[Form]:
        """Forms that have room, by their guess."""
        return sorted(_candidates(problem), key=lambda form: Layer(problem, form).guess_us(units))

    def guess_us(self, problem: ConvProblem, form: Form, units: int) -> float:
        """See `Layer`."""
        return Layer(problem, form).guess_us(units)

    def executable(self, problem: ConvProblem, form: Form, target: Target) -> Executable:
        """Compile one form; no GPU is needed."""
        return FirstLayerExecutable(self.id, problem, form, target)


def _candidates(problem: ConvProblem) -> Iterator[Form]:
    most = problem.y_spec.shape[2]
    for rows, warpgroups, paired in product(_ROWS, _WARPGROUPS, (False, True)):
        form = Form(rows * 2 if paired else rows, warpgroups, paired)
        if form.rows * warpgroups < most + form.rows and Layer(problem, form).fits:
            yield form


ENGINE = FirstLayerEngine()
