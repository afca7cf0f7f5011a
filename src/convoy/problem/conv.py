"""ConvProblem: a 2-D convolution with its epilogue. Sizes and dtypes, no data."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from convoy.errors import InputError
from convoy.problem.mask import WeightMask
from convoy.problem.pool import KINDS, Pool
from convoy.problem.spec import DTYPE_BYTES, FLOAT_DTYPES, LAYOUTS, TensorSpec

DIRECTIONS: Final = ("fprop", "dgrad", "wgrad")
ACTIVATIONS: Final = ("none", "relu", "relu6", "silu", "hardswish", "hardsigmoid", "sigmoid", "gelu")
NUMERICS: Final = ("strict", "as_torch", "half")


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Operations after the convolution in the same kernel: y = pool(activation(conv(x, weight) + bias + residual)).

    `residual` has the dtype and layout of y, and its shape before the pooling. `gelu` is the exact (erf) form. `pool` is only
    for convolutions; most problems have none.
    """

    bias: bool = False
    residual: bool = False
    activation: str = "none"
    pool: Pool | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise InputError("activation", self.activation, "one of " + ", ".join(ACTIVATIONS))

    def __bool__(self) -> bool:
        return self != Epilogue()

    def __str__(self) -> str:
        parts = [name for name in ("bias", "residual") if getattr(self, name)]
        if self.activation != "none":
            parts.append(self.activation)
        if self.pool is not None:
            parts.append(str(self.pool))
        return "+".join(parts) or "none"

    @staticmethod
    def parse(text: str) -> Epilogue:
        """Inverse of `str`."""
        parts = [] if text == "none" else text.split("+")
        pool = Pool.parse(parts.pop()) if parts and parts[-1].startswith(KINDS) else None
        activations = [p for p in parts if p not in ("bias", "residual")]
        if len(activations) > 1 or len(set(parts)) != len(parts) or "none" in activations:
            raise InputError("epilogue", text, "the form bias+residual+relu+max2x2s2x2p0x0")
        return Epilogue("bias" in parts, "residual" in parts, activations[0] if activations else "none", pool)


NO_EPILOGUE: Final = Epilogue()


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """A 2-D cross-correlation, as `torch.nn.functional.conv2d` defines it. x is always the forward input, y the forward output.

    Fields have cuDNN's letters: x is [n, c, h, w], weight is [k, c / groups, r, s], y is [n, k, p, q]; x and y are both in
    `layout`. If the epilogue pools, p and q are still those of the convolution, and y is smaller (`y_spec`). `direction` says
    which of the three is computed from the other two. `acc_dtype` is the type of the sums; `numerics` is the rounding that
    the user allows. `weight_mask` is the digest of the weight's zero pattern, for engines specialised to it; empty for a
    dense problem. `mask` is that pattern; key and equality only use its digest, so a problem read from its key has none until
    it is given. `dynamic_weight` says that weight and bias change from call to call, as in training, so that packing them is
    part of the work. Equality covers every field but `mask`.

    Raises:
        InputError: naming the field, for sizes that torch would refuse too.
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    pad_h: int = 0
    pad_w: int = 0
    stride_h: int = 1
    stride_w: int = 1
    dilation_h: int = 1
    dilation_w: int = 1
    groups: int = 1
    layout: str = "nchw"
    x_dtype: str = "fp32"
    weight_dtype: str = "fp32"
    y_dtype: str = "fp32"
    acc_dtype: str = "fp32"
    numerics: str = "as_torch"
    epilogue: Epilogue = NO_EPILOGUE
    weight_mask: str = ""
    direction: str = "fprop"
    dynamic_weight: bool = False
    mask: WeightMask | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("c", "h", "w", "k", "r", "s", "stride_h", "stride_w", "dilation_h", "dilation_w", "groups"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "an integer of at least 1")
        for name in ("n", "pad_h", "pad_w"):
            if getattr(self, name) < 0:
                raise InputError(name, getattr(self, name), "an integer of at least 0")
        if self.dynamic_weight and self.direction != "fprop":
            raise InputError(
                "dynamic_weight", True, "direction fprop: gradients have no weight that could be packed before"
            )
        if self.c % self.groups or self.k % self.groups:
            raise InputError("groups", self.groups, f"a divisor of c = {self.c} and k = {self.k}")
        for name in ("x_dtype", "weight_dtype", "y_dtype", "acc_dtype"):
            if getattr(self, name) not in FLOAT_DTYPES:
                raise InputError(name, getattr(self, name), "one of " + ", ".join(sorted(FLOAT_DTYPES)))
        for name, allowed in (("layout", LAYOUTS), ("direction", DIRECTIONS), ("numerics", NUMERICS)):
            if getattr(self, name) not in allowed:
                raise InputError(name, getattr(self, name), "one of " + ", ".join(allowed))
        if self.p < 1 or self.q < 1:
            raise InputError(
                "kernel_size",
                (self.r, self.s),
                f"a dilated filter no larger than the padded input of h = {self.h}, w = {self.w}",
            )
        self._check_pool()
        self._check_mask()

    def _check_pool(self) -> None:
        pool = self.epilogue.pool
        if pool is None:
            return
        if self.direction != "fprop":
            raise InputError("epilogue", str(self.epilogue), f"no pooling with direction {self.direction}")
        pool.size(self.p, self.q)

    def _check_mask(self) -> None:
        mask = self.mask
        if mask is None:
            return
        if mask.shape != self.weight_spec.shape:
            raise InputError("mask", mask.shape, f"the weight's shape, {self.weight_spec.shape}")
        if self.weight_mask not in ("", mask.digest):
            raise InputError("weight_mask", self.weight_mask, f"the digest of the mask given, {mask.digest}")
        object.__setattr__(self, "weight_mask", mask.digest)

    @property
    def p(self) -> int:
        """Output height of the convolution."""
        return (self.h + 2 * self.pad_h - self.dilation_h * (self.r - 1) - 1) // self.stride_h + 1

    @property
    def q(self) -> int:
        """Output width of the convolution."""
        return (self.w + 2 * self.pad_w - self.dilation_w * (self.s - 1) - 1) // self.stride_w + 1

    @property
    def x_spec(self) -> TensorSpec:
        """x: [n, c, h, w]."""
        return TensorSpec((self.n, self.c, self.h, self.w), self.x_dtype)

    @property
    def weight_spec(self) -> TensorSpec:
        """Weight: [k, c / groups, r, s]."""
        return TensorSpec((self.k, self.c // self.groups, self.r, self.s), self.weight_dtype)

    @property
    def conv_spec(self) -> TensorSpec:
        """The convolution's result before any pooling, and the spec of a residual: [n, k, p, q]."""
        return TensorSpec((self.n, self.k, self.p, self.q), self.y_dtype)

    @property
    def y_spec(self) -> TensorSpec:
        """y: [n, k, p, q], or its shape after the epilogue's pooling."""
        pool = self.epilogue.pool
        return (
            self.conv_spec if pool is None else TensorSpec((self.n, self.k, *pool.size(self.p, self.q)), self.y_dtype)
        )

    @property
    def reduction_length(self) -> int:
        """Products that are summed for one output element: the K of the implicit GEMM."""
        if self.direction == "fprop":
            return self.c // self.groups * self.r * self.s
        return self.k // self.groups * self.r * self.s if self.direction == "dgrad" else self.n * self.p * self.q

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counted as two; the same for all three directions."""
        return 2 * self.n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s

    @property
    def bytes_min(self) -> int:
        """Least bytes to move: each tensor once, of x only the elements that a tap reads."""
        total = self._x_bytes_min + self.weight_spec.size_bytes + self.y_spec.size_bytes
        total += self.k * DTYPE_BYTES[self.y_dtype] if self.epilogue.bias else 0
        return total + (self.conv_spec.size_bytes if self.epilogue.residual else 0)

    @property
    def _x_bytes_min(self) -> int:
        """All of a gradient; else without the elements between taps, if the stride is longer than the filter.

        In nchw such columns are too close together to be skipped.
        """
        if self.direction == "dgrad":
            return self.x_spec.size_bytes
        rows = min(self.h, self.p * self.r)
        columns = min(self.w, self.q * self.s) if self.layout == "nhwc" else self.w
        return self.n * self.c * rows * columns * DTYPE_BYTES[self.x_dtype]

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes_min if self.bytes_min else 0.0

    @property
    def is_depthwise(self) -> bool:
        """Every group has one input channel."""
        return self.groups == self.c and self.groups > 1

    @property
    def is_pointwise(self) -> bool:
        """A 1x1 filter without padding."""
        return self.r == self.s == 1 and self.pad_h == self.pad_w == 0

    @property
    def fresh_weight(self) -> bool:
        """Deprecated name of `dynamic_weight`; it goes with the next release."""
        warnings.warn("convoy: ConvProblem.fresh_weight is now called dynamic_weight", FutureWarning, stacklevel=2)
        return self.dynamic_weight

    def with_layout(self, layout: str) -> ConvProblem:
        """The same problem in another memory format."""
        return replace(self, layout=layout)

    def with_mask(self, mask: WeightMask | None) -> ConvProblem:
        """The same problem on weights with another pattern of zeros; None: on dense weights."""
        return replace(self, weight_mask="" if mask is None else mask.digest, mask=mask)

    @property
    def key(self) -> str:
        """Canonical text: equal problems have equal keys, and `ConvProblem.parse` reads it back."""
        dtypes = ".".join((self.x_dtype, self.weight_dtype, self.y_dtype, self.acc_dtype))
        parts = [
            "conv",
            self.direction,
            f"n{self.n}c{self.c}h{self.h}w{self.w}k{self.k}r{self.r}s{self.s}",
            f"p{self.pad_h}x{self.pad_w}",
            f"s{self.stride_h}x{self.stride_w}",
            f"d{self.dilation_h}x{self.dilation_w}",
            f"g{self.groups}",
            self.layout,
            dtypes,
            self.numerics,
            str(self.epilogue),
        ]
        mask = f":mask={self.weight_mask}" if self.weight_mask else ""
        return ":".join(parts) + mask + (":fresh" if self.dynamic_weight else "")

    def __str__(self) -> str:
        return self.key

    @staticmethod
    def parse(key: str) -> ConvProblem:
        """Inverse of `key`; raises InputError on anything else."""
        match = _KEY.fullmatch(key)
        if match is None:
            raise InputError("problem", key, "a key such as " + ConvProblem(1, 3, 8, 8, 4, 3, 3).key)
        found = match.groupdict()
        values: dict[str, Any] = {f.name: int(found[f.name]) for f in fields(ConvProblem) if f.type == "int"}
        values |= {name: found[name] for name in _WORDS if found[name] is not None}
        fresh = found["fresh"] is not None
        return ConvProblem(epilogue=Epilogue.parse(found["epilogue"]), dynamic_weight=fresh, **values)


_WORDS = ("direction", "layout", "x_dtype", "weight_dtype", "y_dtype", "acc_dtype", "numerics", "weight_mask")
_KEY = re.compile(
    r"conv:(?P<direction>\w{1,8})"
    r":n(?P<n>\d{1,9})c(?P<c>\d{1,9})h(?P<h>\d{1,9})w(?P<w>\d{1,9})k(?P<k>\d{1,9})r(?P<r>\d{1,9})s(?P<s>\d{1,9})"
    r":p(?P<pad_h>\d{1,9})x(?P<pad_w>\d{1,9}):s(?P<stride_h>\d{1,9})x(?P<stride_w>\d{1,9})"
    r":d(?P<dilation_h>\d{1,9})x(?P<dilation_w>\d{1,9}):g(?P<groups>\d{1,9})"
    r":(?P<layout>\w{1,8}):(?P<x_dtype>\w{1,8})\.(?P<weight_dtype>\w{1,8})\.(?P<y_dtype>\w{1,8})\.(?P<acc_dtype>\w{1,8})"
    r":(?P<numerics>\w{1,10}):(?P<epilogue>[\w+]{1,96})(?::mask=(?P<weight_mask>[0-9a-f]{16}))?"
    r"(?P<fresh>:fresh)?",
    re.ASCII,
)
