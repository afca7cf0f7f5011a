"""WeightMask: the positions of a pruned weight's non-zeros, as plain data. No torch here."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from dataclasses import dataclass

from convoy.errors import InputError

_TEXT = re.compile(r"mask:(\d{1,9})x(\d{1,9})x(\d{1,9})x(\d{1,9}):([A-Za-z0-9+/]*={0,2})", re.ASCII)


@dataclass(frozen=True, slots=True)
class WeightMask:
    """The positions of a weight's values that are not zero (NaN is not zero).

    Attributes:
        shape: the weight's: k, c / groups, r, s.
        bits: one bit per position in row-major order, the first in a byte's highest bit; an incomplete last byte ends in
            zeros.

    Raises:
        InputError: bits that do not fit the shape.
    """

    shape: tuple[int, int, int, int]
    bits: bytes

    def __post_init__(self) -> None:
        if len(self.shape) != 4 or any(side < 1 for side in self.shape):
            raise InputError("mask.shape", self.shape, "four sides of at least 1: k, c / groups, r, s")
        positions = math.prod(self.shape)
        if len(self.bits) != -(-positions // 8):
            raise InputError(
                "mask.bits", f"{len(self.bits)} bytes", f"{-(-positions // 8)} bytes for {positions} positions"
            )
        spare = -positions % 8
        if self.bits[-1] & ((1 << spare) - 1):
            raise InputError("mask.bits", self.bits[-1:], f"{spare} zero bits at the end")

    @property
    def digest(self) -> str:
        """Sixteen hex digits over shape and bits, which identify the mask in a problem's key."""
        return hashlib.sha256(repr(self.shape).encode() + self.bits).hexdigest()[:16]

    @property
    def positions(self) -> int:
        """The weight's number of values, zeros included."""
        return math.prod(self.shape)

    @property
    def nonzeros(self) -> int:
        """Number of values that are not zero."""
        return int.from_bytes(self.bits, "big").bit_count()

    @property
    def sparsity(self) -> float:
        """Share of zeros, from 0 to 1."""
        return 1 - self.nonzeros / self.positions

    @property
    def text(self) -> str:
        """The text that `parse` reads, to pass a mask to another process."""
        return f"mask:{'x'.join(map(str, self.shape))}:{base64.b64encode(self.bits).decode()}"

    @staticmethod
    def parse(text: str) -> WeightMask:
        """Inverse of `text`; raises InputError on anything else."""
        match = _TEXT.fullmatch(text)
        try:
            if match is not None:
                k, c, r, s = (int(side) for side in match.groups()[:4])
                return WeightMask((k, c, r, s), base64.b64decode(match[5], validate=True))
        except binascii.Error:
            pass
        raise InputError("mask", text, "a mask's text: mask:4x2x3x3: and its bits in base64")
