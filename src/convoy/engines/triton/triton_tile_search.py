"""The tiles of one thread block that are worth trying, by the cost model of `triton_tiles`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from operator import itemgetter

from convoy.engines.triton.triton_tiles import SHARED_BYTES, ConvView, TileCosts, TritonTile


def boxes(view: ConvView, sizes: Iterable[int], whole_images: bool = False) -> Iterator[tuple[int, int, int]]:
    """For each number of pixels the box (images, rows, columns) that covers the output with the fewest tiles.

    Of equals, the squarest: it reads the smallest halo. With `whole_images` a box's images divide the batch.
    """
    for pixels in sizes:
        found: list[tuple[int, int, int, int, int, int]] = []
        for bits_w in range(pixels.bit_length()):
            for bits_h in range(pixels.bit_length() - bits_w):
                b_w, b_h = 1 << bits_w, 1 << bits_h
                b_n = pixels // (b_w * b_h)
                if b_n > 1 and (b_n > view.n or (whole_images and view.n % b_n)):
                    continue
                tiles = -(-view.n // b_n) * -(-view.p // b_h) * -(-view.q // b_w)
                overhang = (b_h >= 2 * view.p) + (b_w >= 2 * view.q)
                found.append((tiles, overhang, (b_h + 2) * (b_w + 2) * b_n, b_n, b_h, b_w))
        if found:
            yield min(found)[3:]


_SPLITS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 36)


_Sizes = tuple[int, int, int, int, int, int, int, int]
"""`block_k`, `block_n`, `block_h`, `block_w`, `block_c`, `stages`, `warps`, `split`."""


@lru_cache(maxsize=1024)
def candidate_tiles(view: ConvView, *, block_cs: tuple[int, ...], pixels: tuple[int, ...], ks: tuple[int, ...], units: int,
                    planes: int = 1, limit: int = 32, splits: tuple[int, ...] = _SPLITS,
                    shared: int = SHARED_BYTES, groups: int = 1) -> tuple[TritonTile, ...]:  # fmt: skip
    """The tiles with the best estimates, best first; at most `limit`, with different shapes, in `shared` bytes of shared memory.

    Of tiles that differ only in stages or split the best four are kept, so that the list holds different shapes. Results are
    cached for problems that differ only in their epilogue.
    """
    guesses = _guesses(view, block_cs, pixels, ks, TileCosts(view, units, planes, groups), planes, splits, shared)
    guesses.sort(key=itemgetter(0))
    kept: dict[tuple[int, ...], int] = {}
    chosen: list[TritonTile] = []
    for guess, sizes in guesses:
        if math.isinf(guess) or len(chosen) >= limit:
            break  # none that follows is taken either
        shape = (sizes[0], math.prod(sizes[1:4]), sizes[4])
        if kept.get(shape, 0) >= 4:
            continue
        kept[shape] = kept.get(shape, 0) + 1
        chosen.append(TritonTile(*sizes))
    return tuple(chosen)


def _guesses(
    view: ConvView, block_cs: tuple[int, ...], pixels: tuple[int, ...], ks: tuple[int, ...], costs: TileCosts,
    planes: int, splits: tuple[int, ...], shared: int,
) -> list[tuple[float, _Sizes]]:  # fmt: skip
    """Estimates and sizes, as `TritonTile` takes them, of all tiles that fit: some hundred, few of which become objects."""
    found: list[tuple[float, _Sizes]] = []
    cuts = _cuts(view, block_cs, splits)
    covers = {whole: [(box, math.prod(box), _count(view, box)) for box in boxes(view, pixels, whole)]
              for whole in {split > 1 for split in splits}}  # fmt: skip
    for block_k in ks:
        if block_k > min(ks) and block_k >= 2 * view.k:
            continue
        tiles_k = -(-view.k // block_k)
        for split, depths in cuts:
            for (box, covered, count), (block_c, each) in product(covers[split > 1], depths):
                stage_bytes, _ = costs.step(block_k, covered, block_c)
                depth = _depths(stage_bytes, each, shared)
                for warps in _warps(block_k * covered, block_c * view.bytes_each, planes) if depth else ():
                    guesses = costs.us(
                        block_k, covered, block_c, depth, warps, tiles=tiles_k * count, splits=split, each=each
                    )
                    for stages, guess in zip(depth, guesses, strict=True):
                        found.append((guess, (block_k, *box, block_c, stages, warps, split)))
    return found


def _count(view: ConvView, box: tuple[int, int, int]) -> int:
    """Boxes that cover the output."""
    return -(-view.n // box[0]) * -(-view.p // box[1]) * -(-view.q // box[2])


def _cuts(
    view: ConvView, block_cs: tuple[int, ...], splits: tuple[int, ...]
) -> list[tuple[int, list[tuple[int, int]]]]:
    """For each split the (channels, iterations of a share) with which no share is empty."""
    least = min(block_cs)
    wanted = [size for size in block_cs if size <= least or size < 2 * view.c]
    iterations = {size: view.r * view.s * -(-view.c // size) for size in wanted}
    shares = [(split, [(size, -(-iterations[size] // split)) for size in wanted]) for split in splits]
    return [(split, [(s, each) for s, each in own if -(-iterations[s] // each) == split]) for split, own in shares]


@lru_cache(maxsize=4096)
def _depths(stage_bytes: int, each: int, shared: int) -> tuple[int, ...]:
    """Stages worth trying: four, as deep as a block can be, and as two blocks of one multiprocessor can.

    Of such two, one computes while the other starts or ends.
    """
    fitting = [n for n in (2, 3, 4, 6, 8) if n * stage_bytes < shared - 1024 and n <= max(3, each + 1)]
    if not fitting:
        return ()
    two = [n for n in fitting if 2 * (n * stage_bytes + 1024) <= shared]
    return tuple(sorted({min(4, fitting[-1]), fitting[-1], (two or fitting)[-1]}))


def _warps(area: int, row_bytes: int, planes: int) -> tuple[int, ...]:
    """Warps that a tile may have: of the rest ptxas spills registers or serialises wgmma (C7515, docs/kernels/triton.md)."""
    if planes > 1:
        return (4,) if area < 64 * 128 else (4, 8) if area == 64 * 128 else (8,) if area == 128 * 128 else ()
    if area > 128 * 128:
        return ()
    return (4, 8) if area == 128 * 128 and row_bytes == 256 else (4,)
