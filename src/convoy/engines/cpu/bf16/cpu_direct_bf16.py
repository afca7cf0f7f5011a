"""cpu.direct_bf16: a convolution or linear layer as an implicit GEMM in bf16, in C (direct_bf16.c; docs/kernels/cpu.md).

    for some panels of 32 pixels, gathered as rows of r · s · c values, and for the output channels of a block:
        sums = panel · weight                         AMX's tiles, or VDPBF16PS; fp32
        y = activation(sums + bias + residual)        fp32, rounded to bf16

Tensors are bf16, or fp32 under numerics `half`: operands are then rounded to bf16, and results are not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Engine, Executable, Knobs, Packed
from convoy.engines.compilers.host_compiler import lanes
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.cpu.bf16.bf16_partition import PANELS, Bf16Partition, in_bf16_tiles, in_one_image, panels_of
from convoy.engines.cpu.bf16.bf16_units import CPU_FLAGS, TILE_OPS_H, UNITS, bf16_units
from convoy.engines.cpu.native_launch import PARALLEL_H, KernelSource, Native, NativeExecutable
from convoy.engines.cpu.weight_tiles import ACTIVATIONS, FLAGS, VECTORS_H, as_convolution, taken
from convoy.problem import ConvProblem, LinearProblem, Problem
from convoy.support import Support
from convoy.target import Target

BLOCKS_H: Final = Path(__file__).with_name("blocks.h")
EPILOGUE_H: Final = Path(__file__).with_name("epilogue.h")
SOURCE: Final = Path(__file__).with_name("direct_bf16.c")

CHANNELS: Final = (32, 64)
"""Output channels of a block: two tiles of rows by two of channels (12 rows of vectors), or one by four (6 rows)."""

LEAST_CHANNELS: Final = 4
"""Input channels of a group at least: with fewer the steps of 32 are mostly zeros, except in a net's first layer."""

_SPEED: Final = {"amx": 4.0, "avx512": 2.0}
"""Times the rate of fp32 products that the cost model has: a guess, below the peaks' ratio (16 and 2)."""

_CONVOLUTION: Final = (
    "n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "groups", "p", "q",
)  # fmt: skip
_REST: Final = (
    "activation", "residual", "unit", "channels", "panels", "bands", "splits", "threads", "slot_bytes", "panel_step",
)  # fmt: skip


class _Bf16Sizes(ctypes.Structure):
    """`Sizes` of direct_bf16.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in (*_CONVOLUTION, *_REST))


def kernel(dtype: str, *, emulated: bool = False) -> KernelSource:
    """The kernel for tensors of a dtype; emulated, its instructions for bf16 are plain C."""
    function = "convoy_direct_bf16" if dtype == "bf16" else "convoy_direct_half"
    flags = (*FLAGS, f"-DLANES={lanes()}", f"-DFUNCTION={function}")
    flags += ("-DBF16",) * (dtype == "bf16") + (
        "-DEMULATED",
        "-O1",
        "-fexpensive-optimizations",
    ) * emulated  # sums and products fused as with -O3
    parts = (PARALLEL_H, VECTORS_H, TILE_OPS_H, BLOCKS_H, EPILOGUE_H, SOURCE)
    needs = () if emulated else tuple({flag: None for unit in bf16_units()[0] for flag in CPU_FLAGS[unit]})
    return KernelSource(parts, flags, CpuDirectBf16.id, function, needs)


class Bf16Convolution(NativeExecutable):
    """One call of the library.

    Args:
        problem: the convolution.
        knobs: of `CpuDirectBf16.space`.
        emulated: whether the instructions for bf16 are plain C, for processors without them: exact, and slow.
    """

    def __init__(self, problem: ConvProblem, knobs: Knobs, *, emulated: bool = False) -> None:
        self._problem = problem
        one, threads = in_one_image(problem), torch.get_num_threads()
        division = _division(problem, knobs)
        self.workspace_bytes = threads * division.slot_bytes
        self._sizes = _Bf16Sizes(
            **{name: getattr(one, name) for name in _CONVOLUTION},
            **asdict(division),
            activation=ACTIVATIONS.index(problem.epilogue.activation),
            residual=problem.epilogue.residual,
            unit=UNITS.index(str(knobs["unit"])),
            channels=knobs.integer("channels"),
            panels=PANELS.index(str(knobs["panels"])),
            threads=threads,
        )
        self.use(kernel(problem.x_dtype, emulated=emulated))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Weight and bias in tiles."""
        return in_bf16_tiles(self._problem, constants)

    def native(self, constants: Packed) -> Native | None:
        """Gather, multiply, add, activate."""
        if not self._problem.n:
            return None
        weight, bias = constants
        residual = ("arg", 1) if self._problem.epilogue.residual else None
        return Native(self._sizes, (("arg", 0), weight, bias, residual, ("result", 0), ("workspace", 0)))


class CpuDirectBf16(Engine):
    """Convolutions in nhwc and linear layers in bf16 on a CPU with AMX or AVX-512 BF16."""

    id = "cpu.direct_bf16"
    family = "implicit_gemm"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """What `takes` says, where the CPU, the system and the compiler have the instructions."""
        if not (support := takes(problem, target)):
            return support
        units, refusal = bf16_units()
        return Support.yes() if units else Support.no(refusal)

    def samples(self) -> Sequence[Problem]:
        """A convolution in bf16: `convoy doctor` says by it whether this CPU has the instructions."""
        plain = ConvProblem(1, 64, 14, 14, 64, 3, 3, 1, 1, layout="nhwc", numerics="half")
        return (replace(plain, x_dtype="bf16", weight_dtype="bf16", y_dtype="bf16"),)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Units, output channels of a block, and where panels lie."""
        del target
        return knob_space(convolution_of(problem), bf16_units()[0])

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Panels and sums of each thread."""
        return torch.get_num_threads() * _division(convolution_of(problem), knobs).slot_bytes

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The multiplications, and each tensor once."""
        one = convolution_of(problem)
        return estimate_us(KernelWork(one.flops / _SPEED[str(knobs["unit"])], one.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems of a dtype."""
        del target
        return Bf16Convolution(convolution_of(problem), knobs)


def takes(problem: Problem, target: Target) -> Support:
    """Whether a problem is one of the engine's, whatever instructions the CPU has."""
    if isinstance(problem, LinearProblem):
        problem = as_convolution(problem)
    support = taken(problem, target, grouped=True, dtypes=("bf16", "fp32"))
    if not support or not isinstance(problem, ConvProblem):
        return support
    if problem.x_dtype == "fp32" and problem.numerics != "half":
        return Support.no(f"needs bf16, or fp32 under numerics half, got fp32 under {problem.numerics}")
    if problem.groups > 1 and problem.c // problem.groups < LEAST_CHANNELS:
        return Support.no(
            f"needs groups of at least {LEAST_CHANNELS} input channels, got {problem.c // problem.groups}"
        )
    return Support.yes()


def knob_space(problem: ConvProblem, units: Sequence[str]) -> list[Knobs]:
    """The settings for some units, the default first: few rows are better multiplied with four tiles of channels."""
    rows, outputs = problem.n * problem.p * problem.q, problem.k // problem.groups
    wide = rows <= 16 and outputs > CHANNELS[0]
    channels = [CHANNELS[wide], CHANNELS[not wide]] if outputs > CHANNELS[0] else [CHANNELS[0]]
    return [Knobs.of(unit=u, channels=c, panels=p) for u in units for p in panels_of(problem) for c in channels]


def convolution_of(problem: Problem) -> ConvProblem:
    """A linear layer as a convolution."""
    if isinstance(problem, LinearProblem):
        return as_convolution(problem)
    assert isinstance(problem, ConvProblem)
    return problem


def _division(problem: ConvProblem, knobs: Knobs) -> Bf16Partition:
    threads, channels = torch.get_num_threads(), knobs.integer("channels")
    return Bf16Partition.of(in_one_image(problem), threads, channels, str(knobs["panels"]))


ENGINE = CpuDirectBf16()
