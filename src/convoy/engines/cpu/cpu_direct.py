"""cpu.direct: a dense convolution with its epilogue in NHWC, fp32 sums in registers, in C (direct.c; docs/kernels/cpu.md).

A linear layer is one of 1x1.

    for some pixels and a tile of output channels:
        sums = bias
        for every tap and input channel:
            sums[pixel, 0:tile] += x[pixel] · weight[tap, channel, 0:tile]
        y = activation(sums + residual)

`DirectPartition` says which pixels and tiles are done together, and by whom.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Engine, Executable, Knobs, Packed
from convoy.engines.compilers.host_compiler import lanes
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.cpu.native_launch import KernelSource, Native, NativeExecutable
from convoy.engines.cpu.weight_tiles import (
    ACTIVATIONS,
    STORED,
    VECTOR_FLAGS,
    as_convolution,
    in_tiles,
    storage_kernel,
    taken,
)
from convoy.problem import ConvProblem, LinearProblem, Problem
from convoy.support import Support
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("direct.c")

PIXELS: Final = 6
"""Pixels of a block at most: AVX-512 and NEON have 32 registers (24 sums, 4 weights, a value), AVX2 has 16 (12, 2 and one)."""

MOST_LANES: Final = 16

UNITS: Final = 2
"""Objects of the source, compiled at the same time: 2.7 s for one, 1.3 and 1.7 s for two (gcc 12, AVX-512)."""

PART_BYTES: Final = 128 << 10
"""Bytes of one tile's weights in use at a time: an eighth of an L2 cache of 1 MB, because the next part is prefetched meanwhile,
and inputs and sums need space too."""

BAND_BLOCKS: Final = 14
"""Blocks of a band: enough that weights are read seldom, few enough that the inputs stay in the L2 cache from tile to tile."""

UNITS_A_THREAD: Final = 2
"""With fewer bands than this for each thread, threads share the tiles instead, so that each weight is read once."""

GROUPS_A_THREAD: Final = 8
"""Groups of tiles that a thread has at most. Each reads all inputs, which the L2 cache holds where there are few bands."""

_CONVOLUTION: Final = (
    "n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "p", "q",
)  # fmt: skip
_REST: Final = ("activation", "residual", "bands", "groups", "part_r", "part_c", "threads", "slot_floats")


class _DirectSizes(ctypes.Structure):
    """`Sizes` of direct.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in (*_CONVOLUTION, *_REST))


def tile() -> int:
    """Output channels of a tile."""
    return vectors() * lanes()


def vectors() -> int:
    """Registers of a tile: with `PIXELS` times as many sums, the weights and an input value, they fill the processor's."""
    return 4 if lanes() == MOST_LANES or platform.machine() in ("aarch64", "arm64") else 2


def kernel(dtype: str = "fp32") -> KernelSource:
    """The kernel for this machine's registers and values of a dtype of `STORED`."""
    found = storage_kernel(SOURCE, CpuDirect.id, "convoy_direct", dtype, VECTOR_FLAGS)
    return replace(found, flags=(*found.flags, f"-DVECTORS={vectors()}", f"-DPIXELS={PIXELS}"), units=UNITS)


@dataclass(frozen=True, slots=True)
class DirectPartition:
    """How a problem is cut.

    Attributes:
        bands: of the blocks of an image.
        groups: of the tiles of output channels.
        part_r: filter rows of a part of a tile's weights.
        part_c: input channels of it.
        slot_floats: sums that a thread keeps from part to part.
    """

    bands: int
    groups: int
    part_r: int
    part_c: int
    slot_floats: int

    @staticmethod
    def of(problem: ConvProblem, threads: int) -> DirectPartition:
        """Bands where there are enough of them for all threads; else each thread has its own tiles."""
        blocks, tiles = -(-problem.p * problem.q // PIXELS), -(-problem.k // tile())
        bands, groups = -(-blocks // BAND_BLOCKS), 1
        images = max(1, problem.n)
        if images * bands < UNITS_A_THREAD * threads and threads > 1:
            groups = _groups(tiles, threads)
            bands = min(blocks, -(-threads // (images * groups)))
        row = problem.s * problem.c * tile() * 4
        part_r, part_c = max(1, min(problem.r, PART_BYTES // row)), problem.c
        if problem.r * problem.s == 1:
            part_c = min(problem.c, PART_BYTES // (tile() * 4))
        whole = part_r == problem.r and part_c == problem.c
        held = 0 if whole else -(-blocks // bands) * PIXELS * tile()
        return DirectPartition(bands, groups, part_r, part_c, held)


def _groups(tiles: int, threads: int) -> int:
    """Groups of tiles: several a thread where they are equal, so that a fast core can take some from a slow one."""
    for groups in range(GROUPS_A_THREAD * threads, threads, -threads):
        if tiles % groups == 0:
            return groups
    return min(tiles, threads)


class _DirectConvolution(NativeExecutable):
    """One call of the library."""

    def __init__(self, problem: ConvProblem) -> None:
        threads = torch.get_num_threads()
        division = DirectPartition.of(problem, threads)
        self.workspace_bytes = 4 * threads * division.slot_floats
        self._problem = problem
        self._sizes = _DirectSizes(
            **{name: getattr(problem, name) for name in _CONVOLUTION},
            **asdict(division),
            activation=ACTIVATIONS.index(problem.epilogue.activation),
            residual=problem.epilogue.residual,
            threads=threads,
        )
        self.use(kernel(problem.x_dtype))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Weight and bias in tiles, and the zeros of a filter row."""
        return *in_tiles(self._problem, constants, tile()), constants[0].new_zeros(self._problem.s * self._problem.c)

    def native(self, constants: Packed) -> Native | None:
        """Multiply, add, activate."""
        if not self._problem.n:
            return None
        weight, bias, zeros = constants
        residual = ("arg", 1) if self._problem.epilogue.residual else None
        workspace = ("workspace", 0) if self.workspace_bytes else None
        return Native(self._sizes, (("arg", 0), weight, bias, residual, ("result", 0), zeros, workspace))


class CpuDirect(Engine):
    """Convolutions in nhwc and linear layers, in fp32 or bf16, on a CPU."""

    id = "cpu.direct"
    family = "direct"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions without groups in nhwc, and linear layers, with a residual and an activation."""
        if isinstance(problem, LinearProblem):
            problem = as_convolution(problem)
        return taken(problem, target, dtypes=STORED)

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Sums that wait from one part of the weights to the next."""
        threads = torch.get_num_threads()
        return 4 * threads * DirectPartition.of(_convolution(problem), threads).slot_floats

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The multiplications, and each tensor once."""
        convolution = _convolution(problem)
        return estimate_us(KernelWork(convolution.flops, convolution.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        return _DirectConvolution(_convolution(problem))


def _convolution(problem: Problem) -> ConvProblem:
    if isinstance(problem, LinearProblem):
        return as_convolution(problem)
    assert isinstance(problem, ConvProblem)
    return problem


ENGINE = CpuDirect()
