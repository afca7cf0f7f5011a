"""Operators: the interface from which the nets are built in each framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Array = Any
"""A framework's own tensor, in its own layout."""

Pad = int | tuple[int, int]
"""Zeros on each side of an image: rows and columns alike, or (rows above and below, columns left and right)."""


class Operators(Protocol):
    """Operators of a framework. Images are logically [n, c, h, w]; weights are torch's, found by name."""

    def conv(self, x: Array, name: str, stride: int = 1, pad: Pad = 0) -> Array:
        """Convolution with `name.weight` [k, c / groups, r, s] and, where there is one, `name.bias`.

        There are as many groups as make the image's channels fit the weight's: one a channel is a depthwise convolution.
        """
        ...

    def batch_norm(self, x: Array, name: str, eps: float) -> Array:
        """Batch norm with `name.weight`, `.bias`, `.running_mean`, `.running_var`; in training by the batch's statistics."""
        ...

    def relu(self, x: Array) -> Array:
        """Rectifier."""
        ...

    def relu6(self, x: Array) -> Array:
        """Rectifier that ends at 6."""
        ...

    def silu(self, x: Array) -> Array:
        """Times its own sigmoid."""
        ...

    def sigmoid(self, x: Array) -> Array:
        """Logistic function."""
        ...

    def max_pool(self, x: Array, size: int, stride: int, low: int, high: int) -> Array:
        """Max pooling of values of at least 0 (after ReLU); `low` rows and columns of -inf before the image, `high` after it."""
        ...

    def avg_pool(self, x: Array, size: int, stride: int, pad: int = 0) -> Array:
        """Average pooling; the `pad` zeros on each side count as values (torch's count_include_pad)."""
        ...

    def mean(self, x: Array, *, keep: bool = False) -> Array:
        """The mean over height and width: [n, c], or [n, c, 1, 1] where the sides are kept."""
        ...

    def flatten(self, x: Array) -> Array:
        """[n, c * h * w], in that order."""
        ...

    def linear(self, x: Array, name: str) -> Array:
        """Matrix product with `name.weight` [k, c], plus `name.bias`."""
        ...

    def concat(self, xs: Sequence[Array]) -> Array:
        """Along channels."""
        ...

    def add(self, x: Array, y: Array) -> Array:
        """Sum."""
        ...

    def multiply(self, x: Array, gate: Array) -> Array:
        """Each channel of each image times its gate [n, c, 1, 1]."""
        ...

    def affine(self, x: Array, scale: Sequence[float], shift: Sequence[float]) -> Array:
        """Each channel times its scale plus its shift."""
        ...

    def height(self, x: Array) -> int:
        """Height of a feature map, pixels."""
        ...


def pair(pad: Pad) -> tuple[int, int]:
    """Zeros above and below, and left and right."""
    return (pad, pad) if isinstance(pad, int) else pad
