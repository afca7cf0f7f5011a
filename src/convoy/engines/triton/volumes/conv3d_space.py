"""The tiles of `triton.conv3d` that are worth trying, by rising estimated time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Final

from convoy.engines.triton.volumes.conv3d_cost import estimate_us
from convoy.engines.triton.volumes.conv3d_tile import MOST_TAPS, VolumeTile, block_channels, strided_planes
from convoy.problem import Conv3dProblem
from convoy.problem.spec import DTYPE_BYTES

_SPLITS: Final = (1, 2, 3, 4, 6, 9, 12, 18, 27)
_STAGES: Final = (2, 3, 4, 6)


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
