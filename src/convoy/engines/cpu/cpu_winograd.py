"""cpu.winograd: Winograd's F(2x2,3x3) and F(4x4,3x3) with the epilogue in NHWC, fp32, in C (winograd.c; docs/kernels/cpu.md).

    for some tiles of (m + 2) x (m + 2) pixels:
        V[position] = B^T x B                           every input channel, once
        for some output channels:
            M[position] = V[position] · U[position]     (m + 2)^2 products
            y = activation(A^T M A + bias + residual)

`WinogradPartition` says which tiles and channels are done together, and by whom. The transforms are those of `winograd_tiles`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from convoy.engines.algorithms.winograd_convolution import winograd_support
from convoy.engines.algorithms.winograd_transforms import F2, F4
from convoy.engines.base import Engine, Executable, Knobs, Packed
from convoy.engines.compilers.host_compiler import lanes
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.cpu.cpu_direct import PIXELS, tile, vectors
from convoy.engines.cpu.native_launch import PARALLEL_H, KernelSource, Native, NativeExecutable
from convoy.engines.cpu.weight_tiles import ACTIVATIONS, VECTOR_FLAGS, VECTORS_H, in_tiles, taken
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("winograd.c")

TILES: Final = {transform.m: transform for transform in (F4, F2)}
"""By results of a tile along each side."""

BAND_KIB: Final = (384, 4096)
"""Of a band's transformed inputs and products: a part of a second cache of 1 MB, for the weights go through the rest; or so much
that the weights, many times as large as the inputs in a net's last layers, are read once or twice."""

UNITS_A_THREAD: Final = 2
"""With fewer bands than this for each thread, threads share the output channels instead: a thread then reads its part of the
weights, and every thread transforms every input."""

_CONVOLUTION: Final = ("n", "c", "h", "w", "k", "pad_h", "pad_w", "p", "q")
_REST: Final = (
    "activation",
    "residual",
    "m",
    "rows",
    "columns",
    "bands",
    "groups",
    "row_floats",
    "threads",
    "slot_floats",
)


class _WinogradSizes(ctypes.Structure):
    """`Sizes` of winograd.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in (*_CONVOLUTION, *_REST))


@dataclass(frozen=True, slots=True)
class WinogradPartition:
    """How a problem is partitioned among threads.

    Attributes:
        rows: rows of tiles that cover an image.
        columns: columns of tiles.
        bands: bands of the tiles of all images.
        groups: groups of output channels.
        row_floats: floats of a tile's input channels at one position, padded: tiles a power of two apart would evict each
            other from the L1 cache.
        slot_floats: floats of a band's transformed inputs and products.
    """

    rows: int
    columns: int
    bands: int
    groups: int
    row_floats: int
    slot_floats: int

    @staticmethod
    def of(problem: ConvProblem, knobs: Knobs, threads: int) -> WinogradPartition:
        """Bands of whole blocks, where there are enough of them for all threads; else groups of channels too."""
        transform = TILES[knobs.integer("m")]
        rows, columns = -(-problem.p // transform.m), -(-problem.q // transform.m)
        blocks = -(-max(1, problem.n * rows * columns) // PIXELS)
        row_floats = (-(-problem.c // lanes()) + 1) * lanes()
        block_floats = PIXELS * transform.side**2 * (row_floats + tile())
        fitting = max(1, (knobs.integer("band_kib") << 10) // (4 * block_floats))
        bands, groups = -(-blocks // fitting), 1
        if bands >= UNITS_A_THREAD * threads or threads == 1:
            bands = min(blocks, -(-bands // threads) * threads)
        else:
            groups = min(-(-problem.k // lanes()), threads)
        return WinogradPartition(rows, columns, bands, groups, row_floats, -(-blocks // bands) * block_floats)


class _WinogradConvolution(NativeExecutable):
    """One call of the library."""

    def __init__(self, problem: ConvProblem, knobs: Knobs) -> None:
        threads, transform = torch.get_num_threads(), TILES[knobs.integer("m")]
        division = WinogradPartition.of(problem, knobs, threads)
        self.workspace_bytes = 4 * threads * division.slot_floats
        self._problem, self._transform = problem, transform
        self._sizes = _WinogradSizes(
            **{name: getattr(problem, name) for name in _CONVOLUTION},
            **{name: getattr(division, name) for name in WinogradPartition.__slots__},
            activation=ACTIVATIONS.index(problem.epilogue.activation),
            residual=problem.epilogue.residual,
            m=transform.m,
            threads=threads,
        )
        flags = (*VECTOR_FLAGS, f"-DLANES={lanes()}", f"-DVECTORS={vectors()}", f"-DPIXELS={PIXELS}")
        self.use(KernelSource((PARALLEL_H, VECTORS_H, SOURCE), flags, CpuWinograd.id, "convoy_winograd"))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [tiles of channels, (m + 2)^2, c, tile], transformed in float64 and rounded once; the bias in tiles."""
        weight, bias = in_tiles(self._problem, constants, tile())
        matrix = torch.tensor(self._transform.weight, dtype=torch.float64, device=weight.device)
        both = torch.kron(matrix, matrix)
        transformed = weight.new_empty(len(weight), len(both), *weight.shape[3:])
        # Tile by tile: float64 tensors of all at once would go through memory many times.
        for one, to in zip(weight, transformed, strict=True):
            to.view(len(both), -1).copy_(both @ one.reshape(both.shape[1], -1).double())
        return transformed, bias

    def native(self, constants: Packed) -> Native | None:
        """Transform, multiply, transform, add, activate."""
        if not self._problem.n:
            return None
        residual = ("arg", 1) if self._problem.epilogue.residual else None
        return Native(self._sizes, (("arg", 0), *constants, residual, ("result", 0), ("workspace", 0)))


class CpuWinograd(Engine):
    """fp32 3x3 convolutions at stride 1 in nhwc on a CPU."""

    id = "cpu.winograd"
    family = "winograd"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Dense forward convolutions 3x3 at stride 1 in fp32 and nhwc, with a residual and an activation."""
        support = taken(problem, target)
        return support and winograd_support(problem)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """`m`: results of a tile along each side. `band_kib`: KiB of a band, where it makes a difference."""
        assert isinstance(problem, ConvProblem)
        every = [Knobs.of(m=m, band_kib=kib) for kib in BAND_KIB for m in TILES]
        threads = torch.get_num_threads()
        return list({(k.integer("m"), WinogradPartition.of(problem, k, threads)): k for k in reversed(every)}.values())[
            ::-1
        ]

    def has_knobs(self, problem: Problem, knobs: Knobs, target: Target) -> bool:
        """Every band and tile: which of them `space` leaves out as equal to another depends on the number of threads."""
        offered = {str(Knobs.of(m=m, band_kib=kib)) for kib in BAND_KIB for m in TILES}
        return str(knobs) in offered

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Each thread's band: transformed inputs and products."""
        assert isinstance(problem, ConvProblem)
        threads = torch.get_num_threads()
        return 4 * threads * WinogradPartition.of(problem, knobs, threads).slot_floats

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The products, and each tensor once."""
        assert isinstance(problem, ConvProblem)
        transform = TILES[knobs.integer("m")]
        saved = 9 * transform.m**2 / transform.side**2
        return estimate_us(KernelWork(problem.flops / saved, problem.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        assert isinstance(problem, ConvProblem)
        return _WinogradConvolution(problem, knobs)


ENGINE = CpuWinograd()
