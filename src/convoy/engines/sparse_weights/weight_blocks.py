"""The blocks of a pruned weight that are not zero, of one tap and eight channels each, as lists for tiles of filters.

A block is on a tile's list if any filter of the tile has a value in it. Eight blocks make one iteration of the kernel; a list
is padded to whole iterations. Tiles with long lists come first, so that all multiprocessors finish at about the same time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.problem import ConvProblem, WeightMask
from convoy.typed_torch import from_numpy

CHANNELS: Final = 8
"""Channels of a block: the sixteen bytes of one gather."""

ITERATION_BLOCKS: Final = 8
"""Blocks of one iteration: 128 bytes a pixel."""

NO_BLOCK: Final = -1
_RIGHT_BITS, _CHANNEL_BITS = 8, 15


def live_blocks(mask: NDArray[np.bool_], filters: int) -> NDArray[np.bool_]:
    """By tile, tap and eight channels, whether anything is there.

    Args:
        mask: booleans [k, c, r, s], c a multiple of 8.
        filters: of a tile.
    """
    k, c, r, s = mask.shape
    eights: NDArray[np.bool_] = np.any(mask.reshape(k, c // CHANNELS, CHANNELS, r * s), axis=2).transpose(0, 2, 1)
    padded = np.pad(eights, ((0, -k % filters), (0, 0), (0, 0)))
    return np.any(padded.reshape(-1, filters, r * s, c // CHANNELS), axis=1)


@lru_cache(maxsize=256)
def lengths(mask: WeightMask, filters: int) -> tuple[int, ...]:
    """Iterations of each tile of so many filters, the longest first."""
    counts = live_blocks(positions(mask), filters).sum(axis=(1, 2))
    return tuple(sorted((-(-int(count) // ITERATION_BLOCKS) for count in counts), reverse=True))


@lru_cache(maxsize=256)
def live_share(mask: WeightMask, filters: int) -> float:
    """Share of the blocks that tiles of so many filters read."""
    return float(live_blocks(positions(mask), filters).mean())


def fits(problem: ConvProblem) -> bool:
    """Whether a block's position fits one word: taps at most 255 pixels away, 32768 channels."""
    reach = max((problem.r - 1) * problem.dilation_h, (problem.s - 1) * problem.dilation_w)
    return reach < 1 << _RIGHT_BITS and problem.c <= 1 << _CHANNEL_BITS


class Lists:
    """The lists of one mask for tiles of one size; packs weights by them.

    Attributes:
        tiles: int32 [tiles, 4]: first iteration, the iteration after the last, first filter, unused.
        blocks: int32 [iterations, ITERATION_BLOCKS]: rows down, columns right and channel of each block in a word, or
            `NO_BLOCK`.
    """

    def __init__(self, problem: ConvProblem, filters: int) -> None:
        assert problem.mask is not None
        live = live_blocks(positions(problem.mask), filters)
        counts = -(-live.sum(axis=(1, 2)) // ITERATION_BLOCKS)
        order = np.argsort(-counts, kind="stable")
        ends = np.cumsum(counts[order])
        self.filters = filters
        self.tiles = from_numpy(np.stack([ends - counts[order], ends, order * filters, ends * 0], 1).astype(np.int32))
        self._tile_of = from_numpy(np.repeat(order, counts[order]))
        flat = np.full((int(ends[-1]), ITERATION_BLOCKS), NO_BLOCK, np.int64)
        for tile, start in zip(order, ends - counts[order], strict=True):
            found = np.flatnonzero(live[tile])
            flat[start : start + counts[tile]].reshape(-1)[: len(found)] = found
        tap, eight = flat // (problem.c // CHANNELS), flat % (problem.c // CHANNELS)
        down, right = tap // problem.s * problem.dilation_h, tap % problem.s * problem.dilation_w
        words = down << (_RIGHT_BITS + _CHANNEL_BITS) | right << _CHANNEL_BITS | eight * CHANNELS
        self.blocks = from_numpy(np.where(flat < 0, NO_BLOCK, words).astype(np.int32))
        self._tap, self._eight = (from_numpy(np.where(flat < 0, -1, part)) for part in (tap, eight))

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Chunks [iterations, filters · 128] as bytes: rows of 128 bytes in the 128-byte swizzle of shared memory.

        Args:
            weight: [k, c, r, s] in half or bfloat16, with no value where the mask has none.
        """
        k, c, r, s = weight.shape
        device = weight.device
        blocks = weight.permute(0, 2, 3, 1).reshape(k, -1, CHANNELS)
        # One more block and whole tiles of filters: zeros for the padding of the lists.
        blocks = torch.nn.functional.pad(blocks, (0, 0, 0, 1, 0, -k % self.filters))
        places = torch.where(self._tap < 0, r * s * (c // CHANNELS), self._tap * (c // CHANNELS) + self._eight).to(
            device
        )
        row = torch.arange(self.filters, device=device)
        rows = self._tile_of.to(device)[:, None, None] * self.filters + row[None, :, None]
        swizzled = torch.arange(ITERATION_BLOCKS, device=device)[None, :] ^ (row % 8)[:, None]
        columns = places[:, None, :].expand(-1, self.filters, -1).gather(2, swizzled.expand(len(places), -1, -1))
        chunks = blocks[rows, columns].contiguous().view(torch.uint8)
        return chunks.reshape(len(places), self.filters * ITERATION_BLOCKS * CHANNELS * weight.element_size())
