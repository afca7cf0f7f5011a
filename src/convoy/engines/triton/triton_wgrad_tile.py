"""Tile configurations of `triton.wgrad`, and the cost model that orders them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from convoy.engines.triton.triton_igemm_swap_ab import tensor_support
from convoy.engines.triton.triton_tile_search import boxes
from convoy.engines.triton.triton_tiles import ConvView, conv_view, row_view
from convoy.problem import ConvProblem, Knobs

_SHARED_BYTES = 232448
_PARTIAL_BYTES_NS = 3000.0
_FLOPS_NS_PER_SM = {2: 4096 * 1.6, 4: 2048 * 1.6}
_LOAD_BYTES_NS_PER_SM = 56.0
_MEMORY_BYTES_NS = 2900.0
_LATENCY_NS = 647.0
_STEP_NS = 34.0
"""Nanoseconds of the loads' latency, and of an iteration: as fitted for `triton.swapped` (`triton_tiles`)."""

_MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class WgradTile:
    """One thread block's tile of the gradient, the pixels that it sums in one iteration, and the number of parts of the sum.

    With `images` the pixels are one of each of `block_n` images, else a box.
    """

    block_k: int
    block_c: int
    block_n: int
    block_h: int
    block_w: int
    stages: int
    warps: int
    split: int
    images: bool
    pdl: bool = True

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(**{name: getattr(self, name) for name in self.__slots__})

    @staticmethod
    def of(knobs: Knobs) -> WgradTile:
        """Inverse of `knobs`."""
        switches = {name: bool(knobs[name]) for name in ("images", "pdl")}
        return WgradTile(
            **{name: knobs.integer(name) for name in WgradTile.__slots__ if name not in switches}, **switches
        )

    @property
    def pixels(self) -> int:
        """Pixels of an iteration."""
        return self.block_n * self.block_h * self.block_w

    @property
    def by_registers(self) -> bool:
        """Whether half types of dy reach the tensor core through registers: their tile is a box of more than one side."""
        return not self.images and self.block_n * self.block_h > 1

    def blocks(self, view: ConvView) -> int:
        """Iterations of the whole sum."""
        return -(-view.n // self.block_n) * -(-view.p // self.block_h) * -(-view.q // self.block_w)

    def splits(self, view: ConvView) -> tuple[int, int]:
        """Parts of the sum that are not empty, and iterations of each."""
        blocks = self.blocks(view)
        each = -(-blocks // self.split)
        return -(-blocks // each), each

    def tiles(self, view: ConvView) -> tuple[int, int]:
        """Tiles along k and c."""
        return -(-view.k // self.block_k), -(-view.c // self.block_c)


def wgrad_view(problem: ConvProblem) -> ConvView:
    """A 1x1 convolution of stride 1 is one row of pixels."""
    plain = problem.is_pointwise and problem.stride_h == problem.stride_w == 1
    return row_view(problem) if plain else conv_view(problem)


def estimate_us(view: ConvView, tile: WgradTile, units: int) -> float:
    """Estimated microseconds: the busiest multiprocessor's products or loads, the memory's bytes, and the sum of the parts."""
    splits, each = tile.splits(view)
    tiles = math.prod(tile.tiles(view)) * view.r * view.s * splits
    stage = (tile.block_k + tile.block_c) * tile.pixels * view.bytes_each
    resident = min(2 if tile.warps == 4 else 1, _SHARED_BYTES // (tile.stages * stage + 1024)) or 1
    rounds = -(-tiles // (units * resident)) * resident
    products = 2 * tile.block_k * tile.block_c * tile.pixels / _FLOPS_NS_PER_SM[view.bytes_each]
    # A tile that goes through registers stalls the tensor core at every iteration.
    products *= 1.3 if tile.by_registers else 1.0
    waiting = _LATENCY_NS / (tile.stages * resident) + _STEP_NS
    busy = rounds * each * (max(products, stage / _LOAD_BYTES_NS_PER_SM) + waiting)
    moved = (view.n * view.h * view.w * view.c + view.pixels * view.k) * view.bytes_each / _MEMORY_BYTES_NS
    time = max(busy, moved) + 2500
    if splits > 1:
        time += 1000 + 8 * splits * view.k * view.c * view.r * view.s / _PARTIAL_BYTES_NS
    return time / 1000


def wgrad_tiles(view: ConvView, units: int, limit: int = 24, shared: int = _SHARED_BYTES) -> list[WgradTile]:
    """Tiles worth trying in `shared` bytes of shared memory, by rising estimated time.

    The very first is one for which ptxas never serialises wgmma (C7515).
    """
    found: list[tuple[float, int, WgradTile]] = []
    for block_k in (64, 128, 256):
        for block_c in (32, 64, 128, 256):
            least = (block_k > 64 and block_k >= 2 * view.k) or (block_c > 32 and block_c >= 2 * view.c)
            if least or block_k * block_c > 128 * 256:
                continue
            for pixels, images in _pixels(view):
                for tile in _staged(view, block_k, block_c, pixels, images, units, shared):
                    found.append((estimate_us(view, tile, units), len(found), tile))
    found.sort(key=lambda entry: entry[:2])
    kept: dict[tuple[object, ...], int] = {}
    chosen: list[WgradTile] = []
    for _, _, tile in found:
        shape = (tile.block_k, tile.block_c, tile.pixels, tile.images)
        if kept.get(shape, 0) < 3 and len(chosen) < limit:
            kept[shape] = kept.get(shape, 0) + 1
            chosen.append(tile)
    safe = next((tile for tile in chosen if not tile.by_registers), chosen[0])
    return [safe, *(tile for tile in chosen if tile != safe)]


def _pixels(view: ConvView) -> Iterator[tuple[tuple[int, int, int], bool]]:
    """Pixels of an iteration: of one place in many images, or of a row or a box where TMA can take it."""
    boxed = bool(tensor_support(view, least=1))  # the reduction is over pixels here
    for size in (16, 32, 64):
        if view.n >= size or (size == 16 and (view.n > 8 or not boxed)):
            yield (size, 1, 1), True
    if view.n < 64 and boxed:
        rows = [(1, 1, width) for width in (16, 32, 64) if width < 2 * view.q and -view.q % width * 4 <= view.q]
        rows = rows or [(1, 1, 16)]
        for box in dict.fromkeys([*rows, *boxes(view, (32, 64))]):
            yield box, False


def _staged(
    view: ConvView, block_k: int, block_c: int, box: tuple[int, int, int], images: bool, units: int, shared: int
) -> Iterator[WgradTile]:
    area = block_k * block_c
    stage = (block_k + block_c) * math.prod(box) * view.bytes_each
    by_registers = not images and box[0] * box[1] > 1 and view.bytes_each == 2
    for warps in (4, 8):
        if area > warps * 32 * 128 or (warps == 8 and (area < 128 * 128 or block_k < 128)):
            continue
        if by_registers and area > 128 * 64:  # ptxas serialises wgmma there (C7515)
            continue
        resident = 2 if warps == 4 else 1
        deep = [n for n in (8, 6, 4, 3) if n * stage + 1024 <= shared // resident]
        if not deep:
            continue
        tiles = -(-view.k // block_k) * -(-view.c // block_c) * view.r * view.s
        blocks = -(-view.n // box[0]) * -(-view.p // box[1]) * -(-view.q // box[2])
        many = (units * resident * waves // tiles for waves in (1, 2))
        for split in sorted({min(max(1, n), max(1, blocks // 8), _MOST_SPLITS) for n in many}):
            yield WgradTile(block_k, block_c, *box, deep[0], warps, split, images)


def partial_bytes(view: ConvView, tile: WgradTile) -> int:
    """Bytes of the partial sums in fp32; 0 if the sum is not split."""
    if not view.pixels:
        return 0
    splits, _ = tile.splits(view)
    return 4 * splits * view.k * view.c * view.r * view.s if splits > 1 else 0
