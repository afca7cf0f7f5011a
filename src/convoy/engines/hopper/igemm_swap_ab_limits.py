"""Sizes and limits of `igemm_swap_ab.cu` and `igemm_wgrad.cu`: shared memory, registers, stages, splits."""

from __future__ import annotations

from typing import Final

ROW_BYTES: Final = 128
"""Bytes of a tile's row, one pixel's or filter's block of channels: the span of the widest swizzle."""

CHANNELS: Final = 64
"""Channels of a block, in half types."""

SHARED_BYTES: Final = {1: 232448, 2: 115712}
"""Shared memory of a block, by blocks per multiprocessor: each block takes 1 KB more of the 228 KB."""

MOST_STAGES: Final = 12
"""A stage is full again 770 ns after its release, and small tiles iterate in 76 ns: more stages make loads no faster."""

MOST_SPLIT: Final = 8
EXTRA_BYTES: Final = 1024 + 96
"""Bytes to align the start of the ring buffer, and the barriers that belong to no stage."""

HALOS: Final = 3
"""Boxes of pixels in shared memory if all nine taps read the same box."""

TAPS: Final = 9

REGISTERS: Final = {(1, 1): (40, 232), (2, 1): (40, 232), (3, 1): (32, 160), (1, 2): (40, 216), (2, 2): (32, 104)}
"""Registers of a producer and of a consumer thread, by (consumer warpgroups, blocks per multiprocessor)."""

MOST_SUMS: Final = {(1, 1): 192, (2, 1): 192, (3, 1): 96, (1, 2): 128, (2, 2): 48}
"""Most accumulators of a thread, by the same key; with more, the assembler spills or fails."""

SPLIT_PLANES: Final = 24
"""Accumulators less than `MOST_SUMS` if planes are split among blocks."""

MOST_SHARED_PIXELS: Final = 200
"""Most pixels of a product with two blocks per multiprocessor: accumulators and operands must fit a thread's 128 registers."""


def most_sums(consumers: int, blocks: int, divides: bool, *, splits: bool) -> int:
    """`MOST_SUMS`; 0 if a thread has no registers for so many.

    Args:
        consumers: consumer warpgroups.
        blocks: per multiprocessor.
        divides: whether the activation has a division, which needs some registers.
        splits: whether planes are split among blocks.
    """
    most = MOST_SUMS.get((consumers, blocks), 0) - (SPLIT_PLANES if splits else 0)
    return most - 8 if consumers == 2 and divides else most
