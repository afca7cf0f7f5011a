"""cpu.grouped: convolution in groups of several channels, with its epilogue, in NHWC, in C (docs/kernels/cpu.md)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Engine, Executable, Knobs, Packed
from convoy.engines.compilers.host_compiler import lanes
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.cpu.cpu_direct import PIXELS, vectors
from convoy.engines.cpu.native_launch import KernelSource, Native, NativeExecutable
from convoy.engines.cpu.weight_tiles import ACTIVATIONS, STORED, VECTOR_FLAGS, storage_kernel, taken
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("grouped.c")

LEAST_LANES: Final = 4
"""Output channels of a group are a multiple of this: a smaller register would be mostly empty."""

MOST_CHANNELS: Final = 32
"""Input channels of a group at most, and output channels: the sums of a pixel with more would fill all registers."""

MOST_PIXELS: Final = 12
"""Pixels of a block at most: their sums, one register each, need not wait for each other."""

SLOT_BYTES: Final = 16 << 10
"""Bytes of a band's input values, if one output row does not need more: half of a first cache of 32 KB."""

MOST_SLOT_BYTES: Final = 1 << 20
"""Bytes of one output row's input values at most: half of a second cache of 2 MB, for each value is read once a tap."""

_CONVOLUTION: Final = (
    "n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "p", "q", "groups",
)  # fmt: skip
_REST: Final = ("activation", "residual", "bands", "width", "threads", "slot_floats")


class _GroupedSizes(ctypes.Structure):
    """`Sizes` of grouped.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in (*_CONVOLUTION, *_REST))


@dataclass(frozen=True, slots=True)
class GroupedPartition:
    """How a problem is cut.

    Attributes:
        bands: of an image's rows.
        width: pixels of an input row, with the padding that the taps reach.
        slot_floats: a thread's copy of a band's input values.
    """

    bands: int
    width: int
    slot_floats: int

    @staticmethod
    def of(problem: ConvProblem) -> GroupedPartition:
        """As few bands as fit the first cache."""
        channels = problem.c // problem.groups
        width = (problem.q - 1) * problem.stride_w + (problem.s - 1) * problem.dilation_w + 1
        reach = (problem.r - 1) * problem.dilation_h + 1
        rows = max(1, (SLOT_BYTES // (4 * width * channels) - reach) // problem.stride_h + 1)
        bands = -(-problem.p // rows)
        most = -(-problem.p // bands)  # rows of the largest band
        return GroupedPartition(bands, width, ((most - 1) * problem.stride_h + reach) * width * channels)


def register(filters: int) -> int:
    """Floats of the largest register that a group's filters fill without a rest."""
    return next(width for width in (lanes(), 8, LEAST_LANES) if width <= lanes() and filters % width == 0)


def kernel(problem: ConvProblem) -> KernelSource:
    """The kernel for groups of the problem's size and its stride: a net has few, and each compiles in a second."""
    channels, filters = problem.c // problem.groups, problem.k // problem.groups
    stride = problem.stride_w if problem.stride_w < 3 else 0
    width = register(filters)
    pixels = min(MOST_PIXELS, PIXELS * vectors() * width // filters)
    function = f"convoy_grouped_{channels}_{filters}_{stride}"
    found = storage_kernel(SOURCE, CpuGrouped.id, function, problem.x_dtype, VECTOR_FLAGS)
    own = {"CIN": channels, "KOUT": filters, "STRIDE": stride, "PIXELS": pixels, "GROUPED": found.function}
    flags = [f"-DLANES={width}" if flag.startswith("-DLANES=") else flag for flag in found.flags]
    return replace(found, flags=(*flags, *(f"-D{name}={value}" for name, value in own.items())))


class _Grouped(NativeExecutable):
    """One call of the library."""

    def __init__(self, problem: ConvProblem) -> None:
        division, threads = GroupedPartition.of(problem), torch.get_num_threads()
        self.workspace_bytes = 4 * threads * division.slot_floats
        self._problem = problem
        self._sizes = _GroupedSizes(
            **{name: getattr(problem, name) for name in _CONVOLUTION},
            **asdict(division),
            activation=ACTIVATIONS.index(problem.epilogue.activation),
            residual=problem.epilogue.residual,
            threads=threads,
        )
        self.use(kernel(problem))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Pack the weight as [groups, r, s, c, k] in fp32, and one bias a filter, zero without one."""
        problem, weight = self._problem, constants[0].detach().float()
        in_groups = weight.reshape(problem.groups, -1, *weight.shape[1:]).permute(0, 3, 4, 2, 1).contiguous()
        bias = constants[1].detach().float() if problem.epilogue.bias else weight.new_zeros(problem.k)
        return in_groups, bias.contiguous()

    def native(self, constants: Packed) -> Native | None:
        """Multiply, add, activate."""
        if not self._problem.n:
            return None
        weight, bias = constants
        residual = ("arg", 1) if self._problem.epilogue.residual else None
        return Native(self._sizes, (("arg", 0), weight, bias, residual, ("result", 0), ("workspace", 0)))


class CpuGrouped(Engine):
    """Convolutions in groups of 4 to 32 output channels in nhwc, in fp32 or bf16, on a CPU."""

    id = "cpu.grouped"
    family = "direct"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions in groups in nhwc, with a residual and an activation."""
        support = taken(problem, target, grouped=True, dtypes=STORED)
        if not support or not isinstance(problem, ConvProblem):
            return support
        channels, filters = problem.c // problem.groups, problem.k // problem.groups
        if problem.groups == 1 or filters % LEAST_LANES or max(channels, filters) > MOST_CHANNELS:
            return Support.no(
                f"needs groups of at most {MOST_CHANNELS} channels and filters, these a multiple of {LEAST_LANES}, got"
                f" {problem.groups} groups of {channels} channels and {filters} filters"
            )
        held = 4 * GroupedPartition.of(problem).slot_floats
        if held > MOST_SLOT_BYTES:
            return Support.no(f"needs a group's input rows of at most {MOST_SLOT_BYTES} bytes, got {held}")
        return support

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The copies of input values, one a thread."""
        assert isinstance(problem, ConvProblem)
        return 4 * torch.get_num_threads() * GroupedPartition.of(problem).slot_floats

    def samples(self) -> Sequence[Problem]:
        """Groups of eight, as in a RegNet."""
        return (ConvProblem(1, 64, 56, 56, 64, 3, 3, 1, 1, groups=8, layout="nhwc"),)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The multiplications, of which a register that is not full does fewer at once, and each tensor once."""
        assert isinstance(problem, ConvProblem)
        registers = lanes() // register(problem.k // problem.groups)
        return estimate_us(KernelWork(problem.flops * registers, problem.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems with groups of this size."""
        assert isinstance(problem, ConvProblem)
        return _Grouped(problem)


ENGINE = CpuGrouped()
