"""Elementwise ATen operators and the functions of `fusion_operators.cuh` that compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

UNARY: Final = frozenset({
    "relu", "relu6", "sigmoid", "silu", "hardswish", "hardsigmoid", "tanh", "exp", "mish", "neg", "sqrt", "rsqrt",
    "abs", "reciprocal", "erf", "log", "log1p", "expm1", "square", "logical_not",
})  # fmt: skip
"""`aten.NAME.default(x)`, by the function of the same name."""

BINARY: Final = frozenset({
    "sub", "mul", "div", "maximum", "minimum", "gt", "lt", "ge", "le", "eq", "ne", "logical_and", "logical_or",
})  # fmt: skip
"""`aten.NAME.Tensor(x, y)`, `aten.NAME.Scalar(x, 2.0)` and, for some, `aten.NAME.default(x, y)`."""

BACKWARD: Final[Mapping[str, tuple[tuple[str, float], ...]]] = {
    "threshold_backward": (("threshold", 0.0),),
    "hardtanh_backward": (("min_val", -1.0), ("max_val", 1.0)),
    "leaky_relu_backward": (("negative_slope", 0.01),),
    "hardswish_backward": (),
    "hardsigmoid_backward": (),
    "silu_backward": (),
    "sigmoid_backward": (),
    "tanh_backward": (),
    "gelu_backward": (),
}
"""Gradients of elementwise operators, `aten.NAME.default(dy, x)`, with their numbers. Sigmoid's and tanh's x is the result."""

NUMBERS: Final[Mapping[str, tuple[tuple[str, float], ...]]] = {
    "leaky_relu": (("negative_slope", 0.01),),
    "softplus": (("beta", 1.0), ("threshold", 20.0)),
    "elu": (("alpha", 1.0), ("scale", 1.0), ("input_scale", 1.0)),
    "hardtanh": (("min_val", -1.0), ("max_val", 1.0)),
    "threshold": (("threshold", 0.0), ("value", 0.0)),
}
"""Unary operators with numbers: their names and PyTorch's defaults."""

SAME: Final = frozenset({"clone", "contiguous", "alias", "detach", "lift_fresh_copy"})
"""Operators that give their first argument back, in whatever memory format."""
