"""The size of images: one number for square ones, or height and width."""

from __future__ import annotations

from convoy.errors import InputError

ImageSize = int | tuple[int, int]
"""Pixels: the side of a square image, or (height, width)."""


def sides(size: ImageSize) -> tuple[int, int]:
    """Height and width in pixels.

    Raises:
        InputError: naming `size`: not one or two integers of at least 1.
    """
    both = size if isinstance(size, tuple) else (size, size)
    if len(both) != 2 or any(side < 1 for side in both):
        raise InputError("size", size, "an integer of at least 1, or (height, width)")
    return both
