"""cuda.depthwise: depthwise convolution whose threads go down the image with sums in registers (docs/kernels/depthwise.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import checked
from convoy.engines.gpu.gpu_support_checks import conv_support
from convoy.engines.hopper.nvrtc_kernel import Function, SpillError, absence, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import ACTIVATIONS, kernel_source, nvrtc_options
from convoy.engines.tiled_kernel import TiledKernelEngine
from convoy.errors import CompileError, InputError
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

CHANNELS = 4
"""Channels of a thread if its knobs name none: 8 bytes of half types, 16 of fp32."""

THREADS = 128
MOST_FORMS = 24
MOST_COLUMNS = 32
LARGEST_FILTER = 25
"""Most taps of a filter. Taps are unrolled, and kernels of 49 taps spilled hundreds of bytes a thread (NVRTC 13.0)."""

MOST_REGISTERS = 240
"""Most registers of a thread by the estimate in `registers`; kernels with more spill in any case."""

FEWEST_BLOCKS = 2
"""Fewest blocks per multiprocessor: with two, a thread has the maximum of 255 registers."""

HELD_WEIGHTS = 50
"""Most weights that a thread keeps in registers beside its sums: 9 taps of four channels, or 25 taps of two."""

_MEMORY_BYTES_NS = 3000.0
_START_NS = 592.0
_INSTRUCTIONS_NS = 0.61
"""Warp instructions per nanosecond of one of a multiprocessor's four partitions: a third of the peak rate."""

_WIDENED, _WEIGHT = 2.0, 3.6
"""Instructions to convert a value to fp32, and of a tap whose weights are not in registers."""

_LATENCY_NS = 1034.0
"""Latency of memory under load: the bytes in flight divided by it are the bandwidth.

Fitted to 414 timings of 75 layers on an H100, batch 1 and 32 (root mean square of the logarithm 0.21; 0.42 with the guesses
before the fit)."""


@dataclass(frozen=True, slots=True)
class DepthwiseRegistersTile:
    """A tile configuration: output columns and rows of a thread, input rows that it loads ahead, and its channels."""

    strip: int
    rows: int
    ahead: int
    channels: int = CHANNELS

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        more = {} if self.channels == CHANNELS else {"channels": self.channels}
        return Knobs.of(strip=self.strip, rows=self.rows, ahead=self.ahead, **more)

    @staticmethod
    def of(knobs: Knobs) -> DepthwiseRegistersTile:
        """Inverse of `knobs`; raises InputError for knobs without a valid kernel."""
        channels = knobs.integer("channels") if "channels" in knobs else CHANNELS
        form = DepthwiseRegistersTile(knobs.integer("strip"), knobs.integer("rows"), knobs.integer("ahead"), channels)
        if min(form.strip, form.rows, form.ahead) < 1 or form.channels not in (2, 4):
            raise InputError("knobs", str(knobs), "strip, rows and ahead of at least 1, 2 or 4 channels")
        return form

    def fits(self, problem: ConvProblem) -> bool:
        """Whether a problem's kernel can have this configuration: `ahead` divides `period`, and columns fit a word."""
        room = self.columns(problem) <= MOST_COLUMNS and self.registers(problem) <= MOST_REGISTERS
        return self.period(problem) % self.ahead == 0 and room

    def period(self, problem: ConvProblem) -> int:
        """Input rows after which the sums are in the same registers again."""
        return -(-problem.r // problem.stride_h) * problem.stride_h

    def columns(self, problem: ConvProblem) -> int:
        """Input columns that a strip reads."""
        return (self.strip - 1) * problem.stride_w + problem.s

    def input_rows(self, problem: ConvProblem) -> int:
        """Input rows that a thread reads."""
        return (self.rows - 1) * problem.stride_h + problem.r

    def registers(self, problem: ConvProblem) -> int:
        """Estimated registers of a thread: sums, a converted row, rows in flight, weights, addresses."""
        sums = -(-problem.r // problem.stride_h) * self.strip * self.channels
        waiting = self.ahead * self.columns(problem) * self.channels * DTYPE_BYTES[problem.x_dtype] // 4
        held = problem.r * problem.s * self.channels
        held = (
            held if self.holds(problem) else min(held, 20 * self.channels)
        )  # the others are loaded when they are needed
        return sums + self.columns(problem) * self.channels + held + waiting + 30

    def holds(self, problem: ConvProblem) -> bool:
        """Whether a thread keeps its weights in registers."""
        return problem.r * problem.s * self.channels <= HELD_WEIGHTS

    def blocks(self, problem: ConvProblem) -> int:
        """Blocks per multiprocessor that the compiler is told to leave registers for."""
        return max(1, min(8, 65536 // (THREADS * self.registers(problem))))

    def sizes(self, problem: ConvProblem) -> dict[str, int]:
        """The kernel's run-time sizes, in the order of its structure."""
        groups, strips, bands = problem.c // self.channels, -(-problem.q // self.strip), -(-problem.p // self.rows)
        return {
            "threads": groups * strips * bands * problem.n, "groups": groups, "strips": strips, "bands": bands,
            "h": problem.h, "w": problem.w, "p": problem.p, "q": problem.q, "pad_h": problem.pad_h, "pad_w": problem.pad_w,
            "still": 0,
        }  # fmt: skip

    def parameters(self, problem: ConvProblem, *, dependent: bool = True) -> dict[str, int]:
        """The values of `depthwise_registers_config.cuh`."""
        epilogue = problem.epilogue
        return {
            "VALUE_BYTES": DTYPE_BYTES[problem.x_dtype], "BFLOAT": int(problem.x_dtype == "bf16"),
            "LANE_CHANNELS": self.channels, "FILTER_R": problem.r, "FILTER_S": problem.s, "STRIDE_H": problem.stride_h,
            "STRIDE_W": problem.stride_w, "STRIP": self.strip, "BAND_ROWS": self.rows, "AHEAD": self.ahead,
            "WEIGHTS_IN_REGISTERS": int(self.holds(problem)), "HAS_BIAS": int(epilogue.bias),
            "HAS_RESIDUAL": int(epilogue.residual), "ACTIVATION": ACTIVATIONS.index(epilogue.activation),
            "DEPENDENT": int(dependent), "THREADS": THREADS, "MIN_BLOCKS_PER_SM": self.blocks(problem),
        }  # fmt: skip


def candidates(problem: ConvProblem) -> Iterator[DepthwiseRegistersTile]:
    """Configurations that fit into the registers."""
    for numbers in product((1, 2, 4, 7), (1, 2, 4, 7, 8, 14, 28), (1, 2, 3, 5), (CHANNELS, CHANNELS // 2)):
        form = DepthwiseRegistersTile(*numbers)
        sensible = all(one == 1 or one < 2 * most for one, most in ((form.strip, problem.q), (form.rows, problem.p)))
        if sensible and form.fits(problem):
            yield form


def estimate_us(problem: ConvProblem, form: DepthwiseRegistersTile, units: int) -> float:
    """Estimated time in microseconds: the busiest multiprocessor's instructions, or the memory traffic."""
    threads, taps = form.sizes(problem)["threads"], problem.r * problem.s
    again = form.input_rows(problem) / (form.rows * problem.stride_h)  # a row that two bands need is read twice
    row = form.columns(problem) * (3 + _WIDENED * form.channels)
    row += 0 if form.holds(problem) else _WEIGHT * taps / problem.stride_h
    output = form.strip * (form.channels * (taps + 3) + 4)
    # With three rows or fewer, values are added to sums of other bands too.
    made = form.rows * (again if problem.r <= 3 else 1)
    instructions = form.input_rows(problem) * row + made * output + 120
    warps = -(-threads // 32)
    busy = max(1.0, warps / (4 * units)) * instructions / _INSTRUCTIONS_NS
    asked = form.columns(problem) * form.ahead * 32 * form.channels * DTYPE_BYTES[problem.x_dtype]
    most = form.blocks(problem) * THREADS // 32  # warps of a multiprocessor at one time
    on_the_way = min(most * units, warps) * asked / _LATENCY_NS
    # Most of the second reads hit the cache.
    memory = problem.bytes_min * (0.7 + 0.3 * max(1.0, again)) / min(_MEMORY_BYTES_NS, 2 * on_the_way)
    return (math.hypot(busy, memory) + _START_NS) / 1000


def by_taps(constants: Sequence[torch.Tensor]) -> Packed:
    """The weight [c, 1, r, s] as fp32 [r·s, c], and the bias as a 16-byte aligned tensor."""
    weight = constants[0].detach()
    weight = weight.float().reshape(len(weight), -1).t().contiguous()
    return (weight, *(bias.detach().clone().contiguous() for bias in constants[1:]))


def roomiest(compiled: Callable[[int], tuple[bytes, str]], most: int, fewest: int = FEWEST_BLOCKS) -> tuple[bytes, str]:
    """The kernel for the most blocks per multiprocessor that does not spill.

    Raises:
        SpillError: it spills even with the fewest blocks.
    """
    for blocks in range(most, fewest, -1):
        try:
            return compiled(blocks)
        except SpillError:
            continue
    return compiled(min(most, fewest))


def one_filter_a_channel(problem: ConvProblem, multiple: int, most_taps: int = LARGEST_FILTER) -> Support:
    """Accept as many groups as channels and filters, divisible by `multiple`, with few enough taps and no dilation."""
    if not problem.is_depthwise or problem.k != problem.c:
        return Support.no(f"needs groups = c = k, got {problem.groups}, {problem.c} and {problem.k}")
    if problem.c % multiple:
        return Support.no(f"needs channels as a multiple of {multiple}, got {problem.c}")
    if problem.r * problem.s > most_taps:
        return Support.no(f"needs at most {most_taps} taps, got {problem.r} x {problem.s}")
    if problem.dilation_h * problem.dilation_w != 1:
        return Support.no("needs dilation 1")
    return Support.yes()


class DepthwiseExecutable(Executable):
    """The kernel of one tile configuration for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, form: DepthwiseRegistersTile, target: Target) -> None:
        self.problem, self.form, self.dependent = problem, form, target.capability >= 90
        cubin, self.log = self._compiled(engine, target)
        self.function = Function(engine, cubin, "depthwise_registers", 0)

    def _compiled(self, engine: str, target: Target) -> tuple[bytes, str]:
        """Compile for the most blocks per multiprocessor without spills; the assembler's order of loads decides how many."""
        return roomiest(lambda blocks: self._compiled_for(blocks, engine, target), self.form.blocks(self.problem))

    def _compiled_for(self, blocks: int, engine: str, target: Target) -> tuple[bytes, str]:
        parameters = self.form.parameters(self.problem, dependent=self.dependent) | {"MIN_BLOCKS_PER_SM": blocks}
        options = nvrtc_options(self.problem.epilogue.activation, self.problem.x_dtype)
        return compile_cubin(engine, kernel_source("depthwise_registers", parameters), target, options)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as fp32 [r·s, c], and the bias as a 16-byte aligned tensor."""
        return by_taps(constants)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Launch the kernel; an empty result needs none."""
        del workspace
        problem = self.problem
        if not problem.y_spec.elements:
            return
        x, y, residual = checked(buffers, problem.epilogue.residual)
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        sizes = self.form.sizes(problem)
        arguments = [*map(pointer, (x, weight, y, residual, bias)), structure("Sizes", sizes)]
        blocks = -(-sizes["threads"] // THREADS)
        self.function.launch(x.device.index or 0, blocks, THREADS, arguments, dependent=self.dependent)


class DepthwiseEngine(TiledKernelEngine[DepthwiseRegistersTile]):
    """Direct depthwise convolution; see `depthwise_registers.cu`."""

    id = "cuda.depthwise"
    family = "direct"
    devices = ("cuda",)
    trusted = False
    builds_in_threads = True
    quick_settings = 8
    tile_config = DepthwiseRegistersTile

    def supports(self, problem: Problem, target: Target) -> Support:
        """As many groups as input and output channels, a multiple of 4; at most 25 taps, no dilation. fp32 is exact."""
        if not (found := conv_support(problem, target, 80)):
            return found
        assert isinstance(problem, ConvProblem)
        if reason := absence():
            return Support.no(reason)
        if not (found := one_filter_a_channel(problem, CHANNELS)):
            return found
        if not any(True for _ in candidates(problem)):
            return Support.no(f"needs a filter whose rows fit into registers, got {problem.r} x {problem.s}")
        return Support.yes()

    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[DepthwiseRegistersTile]:
        """The candidates of least estimated time."""
        return sorted(candidates(problem), key=lambda form: estimate_us(problem, form, units))[:MOST_FORMS]

    def estimate_tile_us(self, problem: ConvProblem, form: DepthwiseRegistersTile, units: int) -> float:
        """See `estimate_us` above."""
        return estimate_us(problem, form, units)

    def build_tile(self, problem: ConvProblem, form: DepthwiseRegistersTile, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        if not form.fits(problem):
            raise CompileError(self.id, f"{problem} has no kernel with {form.knobs}")
        return DepthwiseExecutable(self.id, problem, form, target)


ENGINE = DepthwiseEngine()
