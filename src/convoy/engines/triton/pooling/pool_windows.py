"""Pooling windows on the tiles of a convolution."""

from __future__ import annotations

from dataclasses import replace

from convoy.engines.triton.triton_tiles import ConvView, TritonTile
from convoy.problem import ConvProblem, Pool


def unpooled(problem: ConvProblem) -> ConvProblem:
    """The convolution alone."""
    return replace(problem, epilogue=replace(problem.epilogue, pool=None))


def tiles_windows(pool: Pool, p: int, q: int) -> bool:
    """Whether windows cover the image without overlap, gap or edge, and their sides are powers of two: a box can be reduced."""
    sides = (pool.window_h, pool.window_w)
    if sides != (pool.stride_h, pool.stride_w) or pool.pad_h or pool.pad_w or any(s & (s - 1) for s in sides):
        return False
    return not pool.ceil_mode or (p % sides[0] == 0 and q % sides[1] == 0)


def fits(tile: TritonTile, pool: Pool) -> bool:
    """Whether a tile's box holds whole windows."""
    return tile.block_h % pool.window_h == 0 and tile.block_w % pool.window_w == 0


def window_box(view: ConvView, pixels: int, pool: Pool) -> tuple[int, int, int] | None:
    """The box of `pixels` pixels, made of whole windows, that covers the output with the fewest tiles; of equals the squarest."""
    found: list[tuple[int, int, tuple[int, int, int]]] = []
    for bits_h in range(pixels.bit_length()):
        for bits_w in range(pixels.bit_length() - bits_h):
            b_h, b_w = 1 << bits_h, 1 << bits_w
            b_n = pixels // (b_h * b_w)
            if b_h % pool.window_h or b_w % pool.window_w or (b_n > 1 and b_n > view.n):
                continue
            tiles = -(-view.n // b_n) * -(-view.p // b_h) * -(-view.q // b_w)
            found.append((tiles, (b_h + 2) * (b_w + 2) * b_n, (b_n, b_h, b_w)))
    return min(found)[2] if found else None
