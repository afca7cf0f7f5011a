"""TensorSpec, dtypes and layouts, which every problem uses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from convoy.errors import InputError

DTYPE_BYTES: Final[dict[str, int]] = {
    "fp64": 8,
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "bool": 1,
}
"""Bytes of one element, by Convoy's name of the dtype."""

FLOAT_DTYPES: Final = frozenset({"fp64", "fp32", "fp16", "bf16"})

LAYOUTS: Final = ("nchw", "nhwc", "blocked")
"""Memory formats of a 4-D value: torch's contiguous and channels_last, and oneDNN's opaque blocked tensor (CPU only)."""

VOLUME_LAYOUTS: Final = ("ncdhw", "ndhwc")
"""Memory formats of a 5-D value in a graph with three-dimensional convolutions: torch's contiguous and channels_last_3d."""

ANY_LAYOUT: Final = "any"
"""Layout of all other values: they are contiguous and never converted."""

_OF_VOLUMES: Final[dict[str, str]] = dict(zip(LAYOUTS, VOLUME_LAYOUTS, strict=False))
_OF_IMAGES: Final[dict[str, str]] = {volume: image for image, volume in _OF_VOLUMES.items()}


def volume_layout(layout: str) -> str:
    """The layout of 5-D values that belongs to one of 4-D values: channels first, or channels last."""
    return _OF_VOLUMES.get(layout, layout)


def image_layout(layout: str) -> str:
    """Inverse of `volume_layout`."""
    return _OF_IMAGES.get(layout, layout)


def layout_beside(layout: str, rank: int) -> str:
    """The layout of a value of 4 or 5 dimensions at the border of a problem with this layout."""
    return volume_layout(layout) if rank == 5 else image_layout(layout)


_MAX_SIDE_DIGITS: Final = 12
"""Most digits of a side, and (`_MAX_SIDES`) most sides, in a text: more than any tensor has."""
_MAX_SIDES: Final = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (logical order, NCHW for images) and dtype of a tensor; no data, no layout."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InputError("dtype", self.dtype, "one of " + ", ".join(DTYPE_BYTES))
        if any(side < 0 for side in self.shape):
            raise InputError("shape", self.shape, "sides of at least 0")

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.elements * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @staticmethod
    def parse(text: str) -> TensorSpec:
        """Inverse of `str`."""
        dtype, bracket, rest = text.partition("[")
        sides = rest[:-1].split(",") if len(rest) > 1 else []
        right = (
            all(s.isascii() and s.isdigit() and len(s) <= _MAX_SIDE_DIGITS for s in sides) and len(sides) <= _MAX_SIDES
        )
        if not bracket or not rest.endswith("]") or not right:
            raise InputError("tensor spec", text, "the form fp32[1,3,224,224]")
        return TensorSpec(tuple(int(s) for s in sides), dtype)
