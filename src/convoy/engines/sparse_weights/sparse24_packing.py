"""2:4 weights in the layout of sparse tensor cores: two values of every four channels, and their positions as metadata.

A chunk is the data that one iteration of the kernel copies: some filters at one tap and `CHANNELS` channels. First come the
values, two of every four channels, in rows of 64 bytes in the 64-byte swizzle of shared memory; then a word of metadata for
each thread. From "PTX ISA", asynchronous warpgroup products with sparse A: two bits a value, its position among the four,
lower positions first.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.engines.hopper.igemm_swap_ab_limits import CHANNELS
from convoy.typed_torch import from_numpy

VALUE_BYTES: Final = 64
"""Bytes of values in a chunk's row: 32 values of two bytes."""

ROW_BYTES: Final = 72
"""Bytes of a filter's row with its metadata: 16 groups of four channels, four bits each."""

_NONE: Final = 255


def _places() -> NDArray[np.uint8]:
    """By a four's zeros (bit i: channel i has a value) its two places, ascending; `_NONE` where it has more values.

    A place that the values leave free is the first that gives an ascending pair.
    """
    found = np.full((16, 2), _NONE, np.uint8)
    for code in range(16):
        used = [place for place in range(4) if code >> place & 1]
        if len(used) <= 2:
            free = [place for place in range(4) if place not in used]
            found[code] = sorted([*used, *free[: 2 - len(used)]])
    return found


_PLACES: Final = _places()


def fours(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Each four's code: [k, r · s, fours of channels], the last ones filled up with zeros to whole chunks.

    Args:
        mask: booleans [k, c, r, s].
    """
    k, c, r, s = mask.shape
    taps = mask.transpose(0, 2, 3, 1).reshape(k, r * s, c)
    padded = np.pad(taps, ((0, 0), (0, 0), (0, -c % CHANNELS))).reshape(k, r * s, -1, 4)
    return (padded @ np.array([1, 2, 4, 8], np.uint8)).astype(np.uint8)


def crowded(mask: NDArray[np.bool_]) -> int:
    """How many fours of channels have more than two values: 0 for a 2:4 mask."""
    return int((_PLACES[fours(mask), 0] == _NONE).sum())


class Packing:
    """How weights under one 2:4 mask become chunks.

    Args:
        mask: booleans [k, c, r, s], 2:4 along c.
        filters: of a chunk, a multiple of 64.
        cluster: tiles of filters that must come together; missing ones are zeros.
        taps_first: all taps of a block of channels follow each other; otherwise all blocks of a tap do.
    """

    def __init__(self, mask: NDArray[np.bool_], filters: int, cluster: int, *, taps_first: bool = False) -> None:
        self.shape, self.filters = mask.shape, filters
        taps, blocks = mask.shape[2] * mask.shape[3], -(-mask.shape[1] // CHANNELS)
        order = torch.arange(taps * blocks)
        self._order = order.reshape(taps, blocks).T.reshape(-1) if taps_first else order
        k = mask.shape[0]
        self.tiles = -(-k // (filters * cluster)) * cluster
        chosen = np.zeros(
            (self.tiles * filters, mask.shape[2] * mask.shape[3], -(-mask.shape[1] // CHANNELS) * 16, 2), np.uint8
        )
        chosen[..., 1] = 1
        chosen[:k] = _PLACES[fours(mask)]
        self._chosen = from_numpy(chosen)
        self.metadata = from_numpy(self._words(chosen))

    @property
    def iterations(self) -> int:
        """Chunks of a tile: taps by blocks of channels."""
        return self._chosen.shape[1] * self._chosen.shape[2] // 16

    def _words(self, chosen: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Metadata [tiles, iterations, bytes of a chunk's].

        Thread 32·w + 4·g + q of 128 has row 16·w + g and, in its word's high half, row 16·w + g + 8, of both the fours 4·q to
        4·q + 3. Lanes q of 0 and 1 serve the first product, 2 and 3 the second.
        """
        nibbles = (chosen[..., 0] | chosen[..., 1] << 2).astype(np.uint32)
        rows, taps, count = nibbles.shape
        quarters = nibbles.reshape(rows, taps, count // 16, 4, 4) @ np.array([1, 16, 256, 4096], np.uint32)
        halves = quarters.reshape(self.tiles, self.filters // 16, 2, 8, taps * (count // 16), 4)
        words = (halves[:, :, 0] | halves[:, :, 1] << 16).astype("<u4")  # tile, warp, row of eight, iteration, quarter
        return (
            np.ascontiguousarray(words.transpose(0, 3, 1, 2, 4)).reshape(self.tiles, self.iterations, -1).view(np.uint8)
        )

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Chunks [tiles, iterations, filters · ROW_BYTES] as bytes.

        Args:
            weight: [k, c, r, s] in half or bfloat16, with no value where the mask has none.
        """
        k, c, r, s = weight.shape
        rows = weight.permute(0, 2, 3, 1).reshape(k, r * s, c)
        rows = torch.nn.functional.pad(rows, (0, -c % CHANNELS, 0, 0, 0, self.tiles * self.filters - k))
        chosen = self._chosen.to(weight.device).long()
        values = rows.view(*chosen.shape[:3], 4).gather(3, chosen)
        chunks = values.reshape(self.tiles, self.filters, self.iterations, 4, 8)  # 16 bytes each
        row = torch.arange(self.filters, device=weight.device)[:, None]
        place = torch.arange(4, device=weight.device)[None, :] ^ (row // 2 % 4)
        swizzled = chunks.gather(3, place[None, :, None, :, None].expand_as(chunks))
        chunks = swizzled.transpose(1, 2).contiguous().view(torch.uint8).reshape(self.tiles, self.iterations, -1)
        packed = torch.cat([chunks, self.metadata.to(weight.device)], dim=2)
        return packed.index_select(1, self._order.to(weight.device)).contiguous()
