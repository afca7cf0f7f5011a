"""Pool: the pooling after a convolution in the same kernel, by PyTorch's rules. Sizes, no data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from convoy.errors import InputError

KINDS: Final = ("max", "avg")


@dataclass(frozen=True, slots=True)
class Pool:
    """`torch.nn.functional.max_pool2d` or `avg_pool2d` without dilation and without a custom divisor.

    Windows may overlap (stride smaller than the window) or leave gaps. A maximum returns NaN if a value is NaN, and ignores
    the padding; an average counts the padding if `count_include_pad` is set, but never the part of a ceil-mode window beyond
    the padding. A maximum has no count: its `count_include_pad` is False, so that equal poolings are equal.

    Raises:
        InputError: naming the field, for sizes that torch would refuse too.
    """

    kind: str
    window_h: int
    window_w: int
    stride_h: int
    stride_w: int
    pad_h: int = 0
    pad_w: int = 0
    ceil_mode: bool = False
    count_include_pad: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("pool", self.kind, "one of " + ", ".join(KINDS))
        for name in ("window_h", "window_w", "stride_h", "stride_w"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "an integer of at least 1")
        for pad, window in (("pad_h", self.window_h), ("pad_w", self.window_w)):
            if not 0 <= getattr(self, pad) <= window // 2:
                raise InputError(pad, getattr(self, pad), f"an integer from 0 to half of the window, {window // 2}")
        if self.kind == "max" and self.count_include_pad:
            raise InputError("count_include_pad", True, "False for a maximum, which counts nothing")

    def size(self, h: int, w: int) -> tuple[int, int]:
        """Height and width of the result of an image of `h` x `w`.

        Raises:
            InputError: an image smaller than the window.
        """
        found = (
            _positions(h, self.window_h, self.stride_h, self.pad_h, ceil_mode=self.ceil_mode),
            _positions(w, self.window_w, self.stride_w, self.pad_w, ceil_mode=self.ceil_mode),
        )
        if min(found) < 1:
            raise InputError(
                "pool", str(self), f"a window no larger than the padded image of h = {h}, w = {w} that it is given"
            )
        return found

    def __str__(self) -> str:
        window = f"{self.kind}{self.window_h}x{self.window_w}"
        words = "c" * self.ceil_mode + "i" * self.count_include_pad
        return f"{window}s{self.stride_h}x{self.stride_w}p{self.pad_h}x{self.pad_w}{words}"

    @staticmethod
    def parse(text: str) -> Pool:
        """Inverse of `str`; raises InputError on anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InputError(
                "pool", text, "a text such as max3x3s2x2p1x1, with c for ceil mode and i for counted padding"
            )
        sizes = [int(number) for number in match.groups()[1:7]]
        return Pool(match[1], *sizes, ceil_mode=bool(match[8]), count_include_pad=bool(match[9]))


_TEXT = re.compile(r"(max|avg)(\d{1,5})x(\d{1,5})s(\d{1,5})x(\d{1,5})p(\d{1,5})x(\d{1,5})(c?)(i?)", re.ASCII)


def _positions(side: int, window: int, stride: int, pad: int, *, ceil_mode: bool) -> int:
    """Positions of a window along a side; in ceil mode the last one must begin inside the image or the padding before it."""
    span = side + 2 * pad - window
    if span < 0 and not (ceil_mode and span + stride > 0):
        return 0
    found = -(-span // stride) + 1 if ceil_mode else span // stride + 1
    return found - 1 if ceil_mode and (found - 1) * stride >= side + pad else found
