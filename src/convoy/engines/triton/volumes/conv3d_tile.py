"""A thread block's tile of `triton.conv3d`: what it covers, loads and needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from convoy.problem import Conv3dProblem, Knobs
from convoy.problem.spec import DTYPE_BYTES

MOST_TAPS: Final = 8
"""Taps of depth of boxes that share slices: the kernel unrolls them."""


@dataclass(frozen=True, slots=True)
class VolumeTile:
    """A thread block's tile: `depth` boxes of pixels, one slice apart, by `block_k` channels of y.

    Attributes:
        gather: whether x is read by gathered loads; else by TMA boxes.
        flat: with `gather`: whether taps and channels are one axis.
        depth: boxes that share what they read of x; 1 with `gather`.
        block_d: slices of a box; 1 unless `depth` is 1.
        block_h: rows of a box; 1 with `gather`.
        block_w: columns of a box; with `gather` all of its pixels.
        block_k: channels of y.
        block_c: channels of x an iteration.
        stages: depth of the software pipeline.
        warps: warps of a thread block.
        split: shares of the reduction.
        pdl: launched before the previous kernel has ended, and waits inside.
    """

    gather: bool
    flat: bool
    depth: int
    block_d: int
    block_h: int
    block_w: int
    block_k: int
    block_c: int
    stages: int = 3
    warps: int = 4
    split: int = 1
    pdl: bool = True

    @property
    def knobs(self) -> Knobs:
        """As the engine's knobs."""
        return Knobs.of(**{name: getattr(self, name) for name in self.__slots__})

    @staticmethod
    def of(knobs: Knobs) -> VolumeTile:
        """Inverse of `knobs`; raises KeyError or InputError for knobs of another engine."""
        switches = {name: bool(knobs[name]) for name in ("gather", "flat", "pdl")}
        numbers = [knobs.integer(name) for name in VolumeTile.__slots__ if name not in switches]
        return VolumeTile(switches["gather"], switches["flat"], *numbers, pdl=switches["pdl"])

    @property
    def pixels(self) -> int:
        """Pixels of a box."""
        return self.block_d * self.block_h * self.block_w

    def tiles(self, problem: Conv3dProblem) -> tuple[int, int, int, int, int]:
        """Tiles along k, images, depth, height and width; with `gather` along k and all pixels."""
        k = -(-problem.k // self.block_k)
        if self.gather:
            return k, 1, 1, 1, -(-problem.pixels // self.block_w)
        d, p, q = sizes_of(problem)[0]
        return (k, problem.n, -(-d // (self.depth * self.block_d)), -(-p // self.block_h), -(-q // self.block_w))

    def c_blocks(self, problem: Conv3dProblem) -> int:
        """Iterations for one tap."""
        return -(-(problem.c * problem.taps if self.flat else problem.c) // self.block_c)

    def iterations(self, problem: Conv3dProblem) -> int:
        """Iterations of the whole reduction: where boxes share slices, one has all taps of depth."""
        return (1 if self.flat else problem.taps // self.taps_together(problem)) * self.c_blocks(problem)

    def taps_together(self, problem: Conv3dProblem) -> int:
        """Taps of one iteration: all of depth where boxes share slices."""
        return problem.window[0] if self.depth > 1 else 1

    def splits(self, problem: Conv3dProblem) -> tuple[int, int]:
        """Shares of the reduction that are not empty, and iterations of each."""
        iterations = self.iterations(problem)
        each = -(-iterations // self.split)
        return -(-iterations // each), each

    def split_bytes(self, problem: Conv3dProblem) -> int:
        """Bytes of the partial sums: none where the reduction is not split."""
        splits, _ = self.splits(problem)
        return 4 * splits * problem.k * problem.pixels if splits > 1 else 0

    def stage_bytes(self, problem: Conv3dProblem) -> int:
        """Bytes that one iteration loads."""
        span = slices_read(problem, self.depth) if self.depth > 1 else 1
        rows = span * self.pixels + self.taps_together(problem) * self.block_k
        return rows * self.block_c * DTYPE_BYTES[problem.dtype]


@lru_cache(maxsize=64)
def sizes_of(problem: Conv3dProblem) -> tuple[tuple[int, int, int], int, int]:
    """Depth, height and width of y, the least bytes to move, and those of x: asked for every tile."""
    return problem.y_size, problem.bytes_min, problem.x_spec.elements * DTYPE_BYTES[problem.dtype]


def slices_read(problem: Conv3dProblem, depth: int) -> int:
    """Slices of x that `depth` neighbouring slices of y read."""
    t, stride, dilation = problem.window[0], problem.stride[0], problem.dilation[0]
    return len({o * stride + tap * dilation for o in range(depth) for tap in range(t)})


def strided_planes(problem: Conv3dProblem) -> bool:
    """Whether the stride in height and width takes the view of slices."""
    return problem.stride[1:] != (1, 1)


def block_channels(problem: Conv3dProblem) -> list[int]:
    """Channels of x an iteration: 32 to 128 bytes and 16 at least; with a stride divisors of c."""
    width = DTYPE_BYTES[problem.dtype]
    sizes = [size for size in (16, 32, 64) if size * width <= 128]
    if strided_planes(problem):
        return [size for size in sizes if problem.c % size == 0]
    return [size for size in sizes if size == sizes[0] or size < 2 * problem.c]
