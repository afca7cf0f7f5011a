"""zeroskip.cpu: a convolution by the input's non-zero values alone, with its epilogue and pooling, in C (zeroskip.c).

    for every pixel of x, once:          list = [(value, channel) for non-zero values]
    for every output, tap and list:      sums[0:tile] += value · weight[tap, channel, 0:tile]
    y = pool(activation(sums + bias + residual))

The lists serve all taps and all output channels (ECR, arXiv 1909.09927, with the filters side by side), and bias, activation and
pooling follow in the same call (PECR). A band of rows that holds few zeros is multiplied densely by the same call: see
`skip_under`. Zeros are skipped only where all weights are finite: PyTorch's product of a zero and an infinity is NaN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from convoy.engines.activation_sparsity import sparsity_percent
from convoy.engines.base import Engine, Executable, Knobs, Packed
from convoy.engines.compilers.host_compiler import lanes
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.cpu.native_launch import PARALLEL_H, KernelSource, Native, NativeExecutable, Operand
from convoy.engines.cpu.weight_tiles import ACTIVATIONS, CHEAP, FLAGS, VECTORS_H, in_tiles, taken
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("zeroskip.c")

VECTORS: Final = 4
"""Registers of output channels in a tile, as in zeroskip.c."""

ROOM: Final = 16
"""Elements by which a list may be overrun while it is written, as in zeroskip.c."""

BLOCK_C: Final = 96
"""Input channels of a block: with 64 output channels its weights fill 24 of the first cache's 32 KB, and stay for all pixels of
a band."""

BAND_BYTES: Final = 512 << 10
"""Sums and lists of a band: half of a second-level cache of 1 MB."""

BAND_PIXELS: Final = 96
"""Outputs of a band: enough to read the weights seldom. Threads share smaller images by output channels."""

UNITS_A_THREAD: Final = 3
"""Units are handed out as threads become free, for their zeros differ."""


# fmt: off
_CONVOLUTION: Final = ("n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w", "dilation_h",
                       "dilation_w", "p", "q")
_POOLING: Final = ("pool", "window_h", "window_w", "pool_stride_h", "pool_stride_w", "pool_pad_h", "pool_pad_w",
                   "count_include_pad", "y_h", "y_w")
_REST: Final = ("activation", "residual", "band", "tiles_a_unit", "block_c", "threads", "slot_bytes", "skip_under")
# fmt: on


def kernel() -> KernelSource:
    """The kernel for this machine's registers."""
    return KernelSource(
        (PARALLEL_H, VECTORS_H, SOURCE), (*FLAGS, f"-DLANES={lanes()}"), "zeroskip.cpu", "convoy_zeroskip"
    )


class _ZeroskipSizes(ctypes.Structure):
    """`Sizes` of zeroskip.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in (*_CONVOLUTION, *_POOLING, *_REST))


@dataclass(frozen=True, slots=True)
class ZeroskipPartition:
    """How a problem is partitioned into work items.

    Attributes:
        band: rows of the result.
        tiles_a_unit: tiles of output channels.
        block_c: input channels of a list.
        threads: threads that have a part of the workspace.
        slot_bytes: bytes of one thread's sums and lists.
    """

    band: int
    tiles_a_unit: int
    block_c: int
    threads: int
    slot_bytes: int

    @staticmethod
    def of(problem: ConvProblem, threads: int) -> ZeroskipPartition:
        """Bands large enough to reuse the weights, small enough for the cache, and enough work items for all threads."""
        tile = VECTORS * lanes()
        tiles = -(-problem.k // tile)
        blocks = -(-problem.c // BLOCK_C)
        block_c = -(-problem.c // blocks)
        y_h = problem.y_spec.shape[2]
        wanted = UNITS_A_THREAD * threads if threads > 1 else 1
        band = 1
        while band < y_h:
            larger = band + 1
            enough = (larger - 1) * problem.y_spec.shape[3] >= BAND_PIXELS
            units = max(problem.n, 1) * -(-y_h // larger)
            if _slot_bytes(problem, larger, block_c) > BAND_BYTES or (enough and units < wanted):
                break
            band = larger
        bands = max(problem.n, 1) * -(-y_h // band)
        groups = min(tiles, max(1, -(-wanted // bands))) if threads > 1 else 1
        return ZeroskipPartition(band, -(-tiles // groups), block_c, threads, _slot_bytes(problem, band, block_c))


def _slot_bytes(problem: ConvProblem, band: int, block_c: int) -> int:
    """Sums, values, offsets and counts of one band, on a 256-byte boundary."""
    pool = problem.epilogue.pool
    rows = band if pool is None else min(problem.p, (band - 1) * pool.stride_h + pool.window_h)
    inputs = min(problem.h, (rows - 1) * problem.stride_h + (problem.r - 1) * problem.dilation_h + 1)
    lists = -(-problem.c // block_c) * inputs * problem.w
    words = rows * problem.q * VECTORS * lanes() + lists * (2 * (block_c + ROOM) + 1)
    return -(-4 * words // 256) * 256


def skip_under(problem: ConvProblem, block_c: int) -> float:
    """The share of non-zero values below which a band is computed by lists instead of densely.

    In cycles of one core, fitted to twelve layers at six shares of zeros (EPYC 9004, AVX-512; break-even mostly within 0.05
    of the measured one): for each tap and tile of v registers an input value costs 1.04 v densely, and a non-zero value v +
    0.85 by its list; a list costs 22 more, for loading and storing its sums and a mispredicted end; making lists costs 1.2 a
    value.
    """
    taps = problem.r * problem.s
    registers = [_registers(problem.k - first) for first in range(0, problem.k, VECTORS * lanes())]
    dense = taps * 1.04 * sum(registers)
    lists = taps * len(registers) * 22 / block_c + 1.2
    by_list = taps * sum(v + 0.85 for v in registers)
    return min(max((dense - lists) / by_list, 0.0), 1.0)


def _registers(channels: int) -> int:
    """Registers of a tile of so many output channels: four, or fewer for the last one, as in zeroskip.c."""
    return 4 if channels > 2 * lanes() else 2 if channels > lanes() else 1


class _ZeroskipConvolution(NativeExecutable):
    """One call of the library."""

    def __init__(self, problem: ConvProblem, knobs: Knobs) -> None:
        self._problem = problem
        division = ZeroskipPartition.of(problem, torch.get_num_threads())
        self.workspace_bytes = division.threads * division.slot_bytes
        self._sizes, self._dense = (_sizes(problem, division, share) for share in _shares(problem, division, knobs))
        self._tile = VECTORS * lanes()
        self.use(kernel())

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Weight and bias in tiles, and whether zeros may be skipped."""
        return *in_tiles(self._problem, constants, self._tile), bool(torch.isfinite(constants[0]).all())

    def native(self, constants: Packed) -> Native | None:
        """Count, list, multiply, add, activate, pool."""
        if not self._problem.n:
            return None
        weight, bias, finite = constants
        residual: Operand = ("arg", 1) if self._problem.epilogue.residual else None
        tensors: tuple[Operand, ...] = (("arg", 0), weight, bias, residual, ("result", 0), ("workspace", 0))
        return Native(self._sizes if finite else self._dense, tensors)


def _shares(problem: ConvProblem, division: ZeroskipPartition, knobs: Knobs) -> tuple[float, float]:
    """The share of non-zero values below which zeros are skipped: by the knob, and for weights that are not finite."""
    wanted = {"auto": skip_under(problem, division.block_c), "always": 1.1, "never": 0.0}
    return wanted[str(knobs["skip"])], 0.0


def _sizes(problem: ConvProblem, division: ZeroskipPartition, share: float) -> _ZeroskipSizes:
    pool = problem.epilogue.pool
    _, _, y_h, y_w = problem.y_spec.shape
    values = {name: getattr(problem, name) for name in _CONVOLUTION}
    if pool is not None:
        values |= {"pool": 1 if pool.kind == "max" else 2, "window_h": pool.window_h, "window_w": pool.window_w}
        values |= {"pool_stride_h": pool.stride_h, "pool_stride_w": pool.stride_w, "pool_pad_h": pool.pad_h}
        values |= {"pool_pad_w": pool.pad_w, "count_include_pad": pool.count_include_pad}
    values |= {name: getattr(division, name) for name in ("band", "tiles_a_unit", "block_c", "threads", "slot_bytes")}
    return _ZeroskipSizes(
        **values,
        y_h=y_h,
        y_w=y_w,
        activation=ACTIVATIONS.index(problem.epilogue.activation),
        residual=problem.epilogue.residual,
        skip_under=round(1000 * share),
    )


class ZeroSkipCpu(Engine):
    """fp32 convolutions in nhwc on a CPU, faster the more zeros their input holds."""

    id = "zeroskip.cpu"
    family = "direct"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    trusted = False
    skips_zeros = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions without groups in fp32 and nhwc, with a residual, ReLU or ReLU6 and any pooling."""
        return taken(problem, target, pools=True, activations=CHEAP)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Whether to skip is decided at run time, band by band."""
        return (Knobs.of(skip="auto"),)

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Each thread's sums and lists."""
        assert isinstance(problem, ConvProblem)
        division = ZeroskipPartition.of(problem, torch.get_num_threads())
        return division.threads * division.slot_bytes

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The multiplications that are left, and a tenth for looking."""
        assert isinstance(problem, ConvProblem)
        left = min(1.0, 1.1 - (sparsity_percent(knobs) or 0) / 100)
        return estimate_us(KernelWork(problem.flops * left, problem.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        assert isinstance(problem, ConvProblem)
        return _ZeroskipConvolution(problem, knobs)


ENGINE = ZeroSkipCpu()
