"""Tiles of a thread block of `triton.conv3d`: which are worth trying, and an estimate of each one's time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from convoy.problem import Conv3dProblem, Knobs
from convoy.problem.spec import DTYPE_BYTES

MOST_TAPS: Final = 8
"""Taps of depth of boxes that share slices: the kernel unrolls them."""

_CLOCK_GHZ: Final = 1.7
_L2_BYTES_NS_PER_SM: Final = 40.0
"""What the second-level cache delivers to each of an H100's 132 multiprocessors when all of them read (5.3 TB/s in all)."""

_LATENCY_NS: Final = 650.0
_STEP_NS: Final = 40.0
_MEMORY_BYTES_NS: Final = 3000.0
_LAUNCH_US: Final = 2.5
_REDUCE_US: Final = 1.5
_GATHER_FACTOR: Final = 1.3
_STRICT_FACTOR: Final = 12.0
_SPLITS: Final = (1, 2, 3, 4, 6, 9, 12, 18, 27)
_STAGES: Final = (2, 3, 4, 6)


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
        d, p, q = _sizes(problem)[0]
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
def _sizes(problem: Conv3dProblem) -> tuple[tuple[int, int, int], int]:
    """Depth, height and width of y, and the least bytes to move: asked for every tile."""
    return problem.y_size, problem.bytes_min


def slices_read(problem: Conv3dProblem, depth: int) -> int:
    """Slices of x that `depth` neighbouring slices of y read."""
    t, stride, dilation = problem.window[0], problem.stride[0], problem.dilation[0]
    return len({o * stride + tap * dilation for o in range(depth) for tap in range(t)})


def estimate_us(problem: Conv3dProblem, tile: VolumeTile, units: int, shared: int, *, strict: bool = False) -> float:
    """Estimated microseconds: tensor-core cycles, bytes from the second-level cache, bytes in flight, bytes from memory."""
    splits, each = tile.splits(problem)
    blocks = math.prod(tile.tiles(problem)) * splits
    stage_bytes, width = tile.stage_bytes(problem), DTYPE_BYTES[problem.dtype]
    sums = 1.5 * tile.depth * tile.pixels * tile.block_k / (32 * tile.warps)
    if sums + 40 > 250:
        return math.inf
    resident = min(shared // (tile.stages * stage_bytes + 1024), int(65536 // ((sums + 40) * 32 * tile.warps)), 8)
    if resident < 1:
        return math.inf
    products = tile.depth * tile.taps_together(problem)
    first, second = (tile.pixels, tile.block_k) if tile.gather or tile.depth > 1 else (tile.block_k, tile.pixels)
    rows, steps = max(1.0, first / 64), tile.block_c * width / 32
    products_ns = products * rows * steps * max(second / 2, 16 + second / 4) / _CLOCK_GHZ
    if first < 64:
        products_ns *= 2  # mma instead of wgmma
    a_sm = -(-blocks // units)
    waiting_ns = _LATENCY_NS / (tile.stages * max(1, min(a_sm, resident)))
    step_ns = max(products_ns, stage_bytes / _L2_BYTES_NS_PER_SM) + waiting_ns + _STEP_NS
    moved = _sizes(problem)[1] + 2 * tile.split_bytes(problem)
    time = _LAUNCH_US + max(a_sm * each * step_ns, moved / _MEMORY_BYTES_NS) / 1000
    time += _REDUCE_US if splits > 1 else 0.0
    return time * (_GATHER_FACTOR if tile.gather else 1.0) * (_STRICT_FACTOR if strict else 1.0)


@lru_cache(maxsize=512)
def candidate_tiles(
    problem: Conv3dProblem, units: int, shared: int, *, boxes: bool, strict: bool
) -> tuple[VolumeTile, ...]:
    """The tiles with the best estimates, best first; at most 20, and some of each kind: an estimate may favour one too much.

    Of tiles that differ in stages and split alone it keeps two.

    Args:
        problem: a dense problem in ndhwc.
        units: multiprocessors.
        shared: bytes of shared memory that a block may have.
        boxes: whether TMA can read x.
        strict: whether products are exact fp32.
    """
    guesses = [
        (estimate_us(problem, tile, units, shared, strict=strict), tile)
        for base in (*(_boxes(problem) if boxes else ()), *_gathers(problem, strict))
        for tile in _staged(problem, base, units, strict)
    ]
    guesses.sort(key=lambda pair: pair[0])
    shapes: Counter[tuple[int, ...]] = Counter()
    kinds: Counter[int] = Counter()
    chosen: list[VolumeTile] = []
    most = {0: 3 if boxes else 20, 1: 6, 2: 5, 4: 6}
    for guess, tile in guesses:
        kind = 0 if tile.gather else tile.depth
        shape = (kind, tile.block_d, tile.block_h, tile.block_w, tile.block_k, tile.block_c, tile.warps)
        if not math.isinf(guess) and shapes[shape] < 2 and kinds[kind] < most[kind]:
            shapes[shape] += 1
            kinds[kind] += 1
            chosen.append(tile)
    return tuple(chosen)


def _staged(problem: Conv3dProblem, base: VolumeTile, units: int, strict: bool) -> Iterator[VolumeTile]:
    """A tile with each useful split and number of stages."""
    tiles = math.prod(base.tiles(problem))
    for split in _SPLITS:
        if split > 1 and tiles * split > 4 * units:
            return
        shares, each = replace(base, split=split).splits(problem)
        if shares == split:
            fitting = [stages for stages in (_STAGES[:2] if strict else _STAGES) if stages <= max(2, each + 1)]
            yield from (replace(base, split=split, stages=stages) for stages in fitting)


def _channels(problem: Conv3dProblem, sizes: tuple[int, ...]) -> list[int]:
    """Blocks of y's channels: none twice as large as is needed."""
    return [size for size in sizes if size == sizes[0] or size < 2 * problem.k]


def _depths(problem: Conv3dProblem) -> Iterator[int]:
    """How many slices of y may share what they read. With a stride in depth they would share little."""
    yield 1
    if problem.stride[0] == problem.dilation[0] == 1 < problem.window[0] <= MOST_TAPS:
        yield from (depth for depth in (2, 4) if depth <= problem.y_size[0])


def _boxes(problem: Conv3dProblem) -> Iterator[VolumeTile]:
    """Tiles that TMA reads."""
    strided, blocks = strided_planes(problem), block_channels(problem)
    for depth in _depths(problem):
        for pixels in (32, 64, 128, 256) if depth == 1 else (64, 128, 256):
            box = _box(problem, pixels, flat=depth > 1 or strided)
            for block_k in _channels(problem, (32, 64, 128)):
                for block_c in blocks[depth == 1 and len(blocks) > 1 :]:
                    for warps in _warps(depth, pixels, block_k):
                        yield VolumeTile(False, False, depth, *box, block_k, block_c, warps=warps)


def _warps(depth: int, pixels: int, block_k: int) -> tuple[int, ...]:
    """Warps with at most 128 sums a thread. With 8 warps ptxas serialises wgmma (C7515) unless boxes share slices."""
    sums = depth * pixels * block_k // 32
    both = (4, 8) if depth > 1 and pixels >= 128 and sums // 8 >= 64 else (4,)
    return tuple(warps for warps in both if sums // warps <= 128)


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


def _box(problem: Conv3dProblem, pixels: int, *, flat: bool) -> tuple[int, int, int]:
    """The box of that many pixels that covers y with the fewest tiles; of equals the one most like a cube."""
    d, p, q = problem.y_size
    found: list[tuple[int, int, int, int, int]] = []
    for bits_w in range(pixels.bit_length()):
        for bits_h in range(pixels.bit_length() - bits_w):
            b_w, b_h = 1 << bits_w, 1 << bits_h
            b_d = pixels // (b_w * b_h)
            if max(b_d, b_h, b_w) > 256 or (flat and b_d > 1):
                continue
            tiles = -(-d // b_d) * -(-p // b_h) * -(-q // b_w)
            found.append((tiles, (b_d + 2) * (b_h + 2) * (b_w + 2), b_d, b_h, b_w))
    return min(found)[2:]


def _gathers(problem: Conv3dProblem, strict: bool) -> Iterator[VolumeTile]:
    """Tiles of gathered loads; the reduction is one axis if there are few channels."""
    width = 16 if strict else 64 // DTYPE_BYTES[problem.dtype]
    flat = problem.c < width and problem.taps > 1
    length = problem.c * problem.taps if flat else problem.c
    for pixels in (32, 64) if strict else (64, 128):
        for block_k in _channels(problem, (16, 32, 64) if strict else (16, 32, 64, 128)):
            for block_c in (width, 2 * width):
                if block_c == width or block_c < 2 * length:
                    warps = 8 if pixels * block_k >= 128 * 128 else 4
                    yield VolumeTile(True, flat, 1, 1, 1, pixels, block_k, block_c, warps=warps)
