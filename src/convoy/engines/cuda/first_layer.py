"""cuda.first_layer: the first layer and the pooling behind it in one launch (docs/kernels/cuda_first_layer.md)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.cuda.compiled import Function, compile_cubin, pointer
from convoy.engines.cuda.requirements import hopper_alone
from convoy.engines.cuda.source import ACTIVATIONS, first_source, options
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

_MOST_WARPGROUPS: Final = 4
"""Of a multiprocessor: with 128 registers a thread."""

_MOST_COLUMNS: Final = {False: 256, True: 184}
"""Of a row of products, by whether it is pooled: a thread keeps the largest of three rows then."""

_MONOTONE: Final = ("none", "relu", "relu6")
"""Activations of a largest value that are the largest of the activations."""

_TYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ROWS: Final = (1, 2, 3, 4, 5, 7, 8)

_CLOCK_GHZ: Final = 1.6
_LOAD_BYTES_NS: Final = 40.0
_STORE_BYTES_NS: Final = 40.0
_MEMORY_BYTES_NS: Final = 3000.0
_START_NS: Final = 2500.0
"""Nothing of this is fitted yet: what the kernels of `cuda.swapped` take for the like."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the work is cut.

    Attributes:
        rows: of y, that a warpgroup makes.
        warpgroups: of a block.
    """

    rows: int
    warpgroups: int

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(rows=self.rows, warpgroups=self.warpgroups)

    @classmethod
    def of(cls, knobs: Knobs) -> Self:
        """Inverse of `knobs`; raises InputError for what no kernel can be made of."""
        form = cls(knobs.integer("rows"), knobs.integer("warpgroups"))
        if not (1 <= form.rows <= 64 and 1 <= form.warpgroups <= 2):
            raise InputError("knobs", str(knobs), "1 to 64 rows, 1 or 2 warpgroups")
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
    def conv_rows(self) -> int:
        """Rows of the convolution that a warpgroup makes."""
        return 2 * self.form.rows + 1 if self.pooled else self.form.rows

    @property
    def image_bytes(self) -> int:
        """Rows of the image that a block holds."""
        p, form = self.problem, self.form
        step = 2 * form.rows if self.pooled else form.rows
        lines = ((form.warpgroups - 1) * step + self.conv_rows - 1) * p.stride_h + p.r
        return lines * self.phases * self.units * 16

    @property
    def shared_bytes(self) -> int:
        """Results that are put together, the weight, the image, and what rounding up costs."""
        groups = self.columns // 8
        pixels = (-(-groups // 2) if self.pooled else groups) * 8
        return self.form.warpgroups * pixels * 128 + self.problem.r * self.steps * 2048 + self.image_bytes + 128

    @property
    def blocks(self) -> int:
        """That a multiprocessor has room for."""
        room = _SHARED_OF_UNIT // (self.shared_bytes + _BLOCK_BYTES)
        return max(1, min(room, _MOST_WARPGROUPS // self.form.warpgroups))

    @property
    def tiles(self) -> int:
        """Of an image."""
        return -(-self.problem.y_spec.shape[2] // (self.form.rows * self.form.warpgroups))

    def macros(self) -> dict[str, int]:
        """The kernel's settings."""
        p, pool = self.problem, self.problem.epilogue.pool
        _, _, y_rows, y_columns = p.y_spec.shape
        return {
            "C": p.c, "H": p.h, "W": p.w, "K": p.k, "R": p.r, "STRIDE_H": p.stride_h, "PHASES": self.phases,
            "PAD_H": p.pad_h, "PAD_W": p.pad_w, "P": p.p, "Q": p.q, "BN": self.columns, "STEPS": self.steps,
            "UNITS": self.units, "POOLED": int(self.pooled), "POOL_PAD": pool.pad_h if pool else 0,
            "Y_ROWS": y_rows, "Y_COLUMNS": y_columns, "ROWS": self.form.rows, "WARPGROUPS": self.form.warpgroups,
            "BLOCKS": self.blocks, "TILES": self.tiles, "PAIRS_READ": int(p.w % 2 == 0),
            "BF16": int(p.x_dtype == "bf16"), "BIAS": int(p.epilogue.bias),
            "ACTIVATION": ACTIVATIONS.index(p.epilogue.activation),
        }  # fmt: skip

    def guess_us(self, units: int) -> float:
        """A guess in microseconds: the busiest multiprocessor's products with its loads and stores, or the memory's bytes."""
        p, form = self.problem, self.form
        tiles = -(-p.n * self.tiles // units)
        products = form.warpgroups * self.conv_rows * p.r * self.steps * max(self.columns / 2, 16 + self.columns / 4)
        stored = form.warpgroups * form.rows * p.y_spec.shape[3] * p.k * 2
        alone = products / _CLOCK_GHZ + stored / _STORE_BYTES_NS + self.image_bytes / _LOAD_BYTES_NS
        # Blocks beside each other hide each other's loads and stores.
        busy = alone + (tiles - 1) * max(products / _CLOCK_GHZ, alone / self.blocks)
        return (math.hypot(busy, p.bytes_min / _MEMORY_BYTES_NS) + _START_NS) / 1000


def in_slices(weight: torch.Tensor, steps: int) -> torch.Tensor:
    """The weight as products read it: [r, steps, 2 units, 8 x 8 filters, 2 pixels, 4 channels], zeros for what is not there.

    Args:
        weight: [k, c, r, s].
        steps: pairs of units of a row of the filter.
    """
    k, c, r, s = weight.shape
    whole = torch.nn.functional.pad(weight, (0, 4 * steps - s, 0, 0, 0, MOST_CHANNELS - c, 0, FILTERS - k))
    parts = whole.reshape(8, 8, MOST_CHANNELS, r, steps, 2, 2)
    return parts.permute(3, 4, 5, 0, 1, 6, 2).contiguous()


class FirstLayerExecutable(Executable):
    """One form for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, form: Form, target: Target) -> None:
        self.problem, self.layer = problem, Layer(problem, form)
        if self.layer.shared_bytes > SHARED_BYTES:
            raise InputError("knobs", str(form.knobs), f"fewer rows: {self.layer.shared_bytes} bytes of shared memory")
        text = first_source(self.layer.macros(), problem.x_dtype)
        cubin, self.log = compile_cubin(engine, text, target, options(problem.epilogue.activation, problem.x_dtype))
        self.function = Function(engine, cubin, "first_layer", self.layer.shared_bytes)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """See `in_slices`; the bias as it is."""
        weight = in_slices(constants[0].detach(), self.layer.steps)
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
        if Layer(problem, Form(1, 1)).shared_bytes > SHARED_BYTES:
            return Support.no("has no room for the weight and the rows of the image of one row of y")
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
    for rows in _ROWS:
        for warpgroups in (1, 2):
            form = Form(rows, warpgroups)
            if rows * warpgroups < most + rows and Layer(problem, form).shared_bytes <= SHARED_BYTES:
                yield form


ENGINE = FirstLayerEngine()
