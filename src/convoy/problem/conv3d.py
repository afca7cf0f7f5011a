"""Conv3dProblem: a three-dimensional convolution with its epilogue. Sizes and dtypes, no data."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from convoy.errors import InputError
from convoy.problem.conv import DIRECTIONS, NO_EPILOGUE, NUMERICS, ConvProblem, Epilogue
from convoy.problem.spec import DTYPE_BYTES, FLOAT_DTYPES, VOLUME_LAYOUTS, TensorSpec

Triple = tuple[int, int, int]
"""Depth, height, width."""


@dataclass(frozen=True, slots=True)
class Conv3dProblem:
    """A cross-correlation of volumes, as `torch.nn.functional.conv3d` defines it. x is always the forward input, y the output.

    x is [n, c, *size], weight is [k, c / groups, *window], y is [n, k, *y_size]. All tensors have one dtype; sums are fp32,
    fp64 for fp64. x, y and the weight's gradient are in `layout`. `direction`, `numerics` and `dynamic_weight` are those of
    `ConvProblem`; the epilogue has no pooling.

    Attributes:
        n: volumes.
        c: channels of x.
        size: depth, height and width of x.
        k: filters.
        window: depth, height and width of a filter.
        pad: zeros before and behind x, for each side.
        stride: for each side.
        dilation: for each side.
        groups: groups of channels.
        layout: one of `VOLUME_LAYOUTS`.
        dtype: of x, weight and y.
        numerics: the rounding that the user allows.
        epilogue: operations after the convolution.
        direction: which of x, weight and y is computed from the other two.
        dynamic_weight: whether weight and bias change from call to call.

    Raises:
        InputError: naming the field, for sizes that torch would refuse too.
    """

    n: int
    c: int
    size: Triple
    k: int
    window: Triple
    pad: Triple = (0, 0, 0)
    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    groups: int = 1
    layout: str = "ncdhw"
    dtype: str = "fp32"
    numerics: str = "as_torch"
    epilogue: Epilogue = NO_EPILOGUE
    direction: str = "fprop"
    dynamic_weight: bool = False

    def __post_init__(self) -> None:
        for name, least in (("n", 0), ("c", 1), ("k", 1), ("groups", 1)):
            if getattr(self, name) < least:
                raise InputError(name, getattr(self, name), f"an integer of at least {least}")
        for name, least in (("size", 1), ("window", 1), ("pad", 0), ("stride", 1), ("dilation", 1)):
            if min(getattr(self, name)) < least:
                raise InputError(name, getattr(self, name), f"three integers of at least {least}")
        for name, allowed in (("layout", VOLUME_LAYOUTS), ("direction", DIRECTIONS), ("numerics", NUMERICS)):
            if getattr(self, name) not in allowed:
                raise InputError(name, getattr(self, name), "one of " + ", ".join(allowed))
        if self.dtype not in FLOAT_DTYPES:
            raise InputError("dtype", self.dtype, "one of " + ", ".join(sorted(FLOAT_DTYPES)))
        if self.dynamic_weight and self.direction != "fprop":
            raise InputError("dynamic_weight", True, "direction fprop")
        if self.c % self.groups or self.k % self.groups:
            raise InputError("groups", self.groups, f"a divisor of c = {self.c} and k = {self.k}")
        if self.epilogue.pool is not None:
            raise InputError("epilogue", str(self.epilogue), "no pooling after a three-dimensional convolution")
        if min(self.y_size) < 1:
            raise InputError(
                "kernel_size", self.window, f"a dilated filter no larger than the padded input, {self.size}"
            )

    @property
    def y_size(self) -> Triple:
        """Depth, height and width of y."""
        sides = zip(self.size, self.window, self.pad, self.stride, self.dilation, strict=True)
        depth, height, width = (
            (x + 2 * pad - dilation * (window - 1) - 1) // stride + 1 for x, window, pad, stride, dilation in sides
        )
        return depth, height, width

    @property
    def x_dtype(self) -> str:
        """The dtype of x, as a `ConvProblem` has it."""
        return self.dtype

    @property
    def y_dtype(self) -> str:
        """The dtype of y, likewise."""
        return self.dtype

    @property
    def acc_dtype(self) -> str:
        """The dtype of the sums."""
        return "fp64" if self.dtype == "fp64" else "fp32"

    @property
    def x_spec(self) -> TensorSpec:
        """x: [n, c, *size]."""
        return TensorSpec((self.n, self.c, *self.size), self.dtype)

    @property
    def weight_spec(self) -> TensorSpec:
        """Weight: [k, c / groups, *window]."""
        return TensorSpec((self.k, self.c // self.groups, *self.window), self.dtype)

    @property
    def y_spec(self) -> TensorSpec:
        """y, and the residual: [n, k, *y_size]."""
        return TensorSpec((self.n, self.k, *self.y_size), self.dtype)

    @property
    def conv_spec(self) -> TensorSpec:
        """The residual's spec, as a `ConvProblem` has it."""
        return self.y_spec

    @property
    def taps(self) -> int:
        """Values of a filter for one channel."""
        return prod(self.window)

    @property
    def pixels(self) -> int:
        """Values of y in one channel of all volumes."""
        return self.n * prod(self.y_size)

    @property
    def reduction_length(self) -> int:
        """Products that are summed for one output element."""
        if self.direction == "wgrad":
            return self.pixels
        return (self.c if self.direction == "fprop" else self.k) // self.groups * self.taps

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counted as two; the same for all three directions."""
        return 2 * self.pixels * self.k * (self.c // self.groups) * self.taps

    @property
    def bytes_min(self) -> int:
        """Least bytes to move: each tensor once, of x only what a tap reads."""
        read = [min(x, y * window) for x, y, window in zip(self.size, self.y_size, self.window, strict=True)]
        if self.direction == "dgrad" or self.layout == "ncdhw":
            read[2] = self.size[2]
        sides = self.size if self.direction == "dgrad" else read
        total = self.n * self.c * prod(sides) * DTYPE_BYTES[self.dtype]
        total += self.weight_spec.size_bytes + self.y_spec.size_bytes * (2 if self.epilogue.residual else 1)
        return total + (self.k * DTYPE_BYTES[self.dtype] if self.epilogue.bias else 0)

    def with_layout(self, layout: str) -> Conv3dProblem:
        """The same problem in another memory format."""
        return replace(self, layout=layout)

    @property
    def key(self) -> str:
        """Canonical text: equal problems have equal keys, and `Conv3dProblem.parse` reads it back."""
        (d, h, w), (t, r, s) = self.size, self.window
        sizes = f"n{self.n}c{self.c}d{d}h{h}w{w}k{self.k}t{t}r{r}s{s}"
        lists = (("p", self.pad), ("s", self.stride), ("d", self.dilation))
        words = [f"{letter}{'x'.join(map(str, sides))}" for letter, sides in lists]
        parts = ["conv3d", self.direction, sizes, *words, f"g{self.groups}", self.layout, self.dtype, self.numerics]
        return ":".join([*parts, str(self.epilogue)]) + (":fresh" if self.dynamic_weight else "")

    def __str__(self) -> str:
        return self.key

    @staticmethod
    def parse(key: str) -> Conv3dProblem:
        """Inverse of `key`; raises InputError on anything else."""
        match = _KEY.fullmatch(key)
        if match is None:
            raise InputError("problem", key, "a key such as " + Conv3dProblem(1, 3, (8, 8, 8), 4, (3, 3, 3)).key)
        n, c, d, h, w, k, t, r, s, *rest, groups = (int(number) for number in match.groups()[1:20])
        pad, stride, dilation = ((rest[i], rest[i + 1], rest[i + 2]) for i in (0, 3, 6))
        return Conv3dProblem(
            *(n, c, (d, h, w), k, (t, r, s), pad, stride, dilation, groups),
            layout=match["layout"],
            dtype=match["dtype"],
            numerics=match["numerics"],
            epilogue=Epilogue.parse(match["epilogue"]),
            direction=match["direction"],
            dynamic_weight=match["fresh"] is not None,
        )

    @property
    def slices_are_images(self) -> bool:
        """Whether each slice is convolved by itself, and lies in memory like an image of a batch."""
        return self.window[0] == self.stride[0] == 1 and not self.pad[0] and self.layout == "ndhwc"

    def as_2d(self) -> ConvProblem | None:
        """The 2-D problem that computes the same on views of the same memory; None if there is none.

        - A filter of depth 1 without stride or padding in depth: slices are images of a batch. That takes channels last.
        - A filter of height and width 1, likewise: each slice is one row of an image of depth by height * width.
        """
        if self.slices_are_images:
            return self._plane(self.n * self.size[0], 1)
        flat = self.window[1:] == self.stride[1:] == (1, 1) and self.pad[1:] == (0, 0)
        return self._plane(self.n, 0) if flat else None

    def _plane(self, n: int, first: int) -> ConvProblem:
        """With two sides left: height and width (`first` 1), or depth and all of a slice (0)."""
        d, h, w = self.size
        sides = (h, w) if first else (d, h * w)
        kept = slice(first, first + 2)
        dilation = [step if many > 1 else 1 for step, many in zip(self.dilation, self.window, strict=True)]
        return ConvProblem(
            *(n, self.c, *sides, self.k, *self.window[kept], *self.pad[kept], *self.stride[kept], *dilation[kept]),
            groups=self.groups,
            layout="nhwc" if self.layout == "ndhwc" else "nchw",
            x_dtype=self.dtype,
            weight_dtype=self.dtype,
            y_dtype=self.dtype,
            acc_dtype=self.acc_dtype,
            numerics=self.numerics,
            epilogue=self.epilogue,
            direction=self.direction,
            dynamic_weight=self.dynamic_weight,
        )


_N: Final = r"(\d{1,9})"
_THREE: Final = f"{_N}x{_N}x{_N}"
_KEY: Final = re.compile(
    rf"conv3d:(?P<direction>\w{{1,8}}):n{_N}c{_N}d{_N}h{_N}w{_N}k{_N}t{_N}r{_N}s{_N}:p{_THREE}:s{_THREE}:d{_THREE}:g{_N}"
    r":(?P<layout>\w{1,8}):(?P<dtype>\w{1,8}):(?P<numerics>\w{1,10}):(?P<epilogue>[\w+]{1,96})(?P<fresh>:fresh)?",
    re.ASCII,
)
