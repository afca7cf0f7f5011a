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

ANY_LAYOUT: Final = "any"
"""Layout of values that are not 4-D: they are contiguous and never converted."""


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
