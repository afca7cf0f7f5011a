"""How the tile kernels cut a convolution, with or without pooling, into tiles."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.problem import ConvProblem, Knobs


def way_of_pooling(problem: ConvProblem) -> str:
    """How a tile pools: `none`, `pairs` (2x2 windows in registers) or `windows` (any, through memory of the block's own)."""
    pool = problem.epilogue.pool
    if pool is None:
        return "none"
    square = (pool.window_h, pool.window_w, pool.stride_h, pool.stride_w) == (2, 2, 2, 2)
    whole = not pool.ceil_mode or (problem.p % 2 == 0 and problem.q % 2 == 0)
    return "pairs" if square and not (pool.pad_h or pool.pad_w) and whole else "windows"


@dataclass(frozen=True, slots=True)
class TileGeometry:
    """How a problem falls into tiles.

    Attributes:
        way: see `way_of_pooling`.
        result_h: rows of results of a tile.
        result_w: columns.
        region_h: rows of the convolution that they need.
        region_w: columns; of a tile in memory a row is `pitch` long.
        pitch: a power of two.
        block_p: rows of the product.
        block_r: results, up to a power of two.
    """

    way: str
    result_h: int
    result_w: int
    region_h: int
    region_w: int
    pitch: int
    block_p: int
    block_r: int

    @staticmethod
    def of(problem: ConvProblem, knobs: Knobs) -> TileGeometry:
        """The knobs `tile_h` and `tile_w` are powers of two: the pixels of the convolution that a tile computes."""
        tile_h, tile_w = knobs.integer("tile_h"), knobs.integer("tile_w")
        pool, way = problem.epilogue.pool, way_of_pooling(problem)
        if pool is None:
            return TileGeometry(way, tile_h, tile_w, tile_h, tile_w, tile_w, tile_h * tile_w, tile_h * tile_w)
        if way == "pairs":
            return TileGeometry(
                way, tile_h // 2, tile_w // 2, tile_h, tile_w, tile_w, tile_h * tile_w, tile_h * tile_w // 4
            )
        tile_h, tile_w = max(tile_h, power_of_two(pool.window_h)), max(tile_w, power_of_two(pool.window_w))
        result_h, result_w = (
            (tile_h - pool.window_h) // pool.stride_h + 1,
            (tile_w - pool.window_w) // pool.stride_w + 1,
        )
        region_h = (result_h - 1) * pool.stride_h + pool.window_h
        region_w = (result_w - 1) * pool.stride_w + pool.window_w
        return TileGeometry(
            way, result_h, result_w, region_h, region_w, tile_w, tile_h * tile_w, power_of_two(result_h * result_w)
        )

    def tiles(self, problem: ConvProblem) -> tuple[int, int]:
        """Tiles down and across an image."""
        _, _, y_h, y_w = problem.y_spec.shape
        return -(-y_h // self.result_h), -(-y_w // self.result_w)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
