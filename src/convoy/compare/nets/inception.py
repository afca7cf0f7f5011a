"""Inception v3: Szegedy et al., "Rethinking the Inception architecture for computer vision", 2015."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from convoy.compare.nets.googlenet import basic_conv
from convoy.compare.nets.operators import Array, Operators, Pad

WIDE: Final = (0, 3)
"""Zeros around the image of a 1x7 filter."""

TALL: Final = (3, 0)
"""Zeros around the image of a 7x1 filter."""


def inception_v3(ops: Operators, x: Array) -> Array:
    """[n, 3, h, w] to [n, classes], of 75 pixels at least; without the auxiliary classifier and without dropout."""
    x = basic_conv(ops, basic_conv(ops, x, "Conv2d_1a_3x3", 2), "Conv2d_2a_3x3")
    x = ops.max_pool(basic_conv(ops, x, "Conv2d_2b_3x3", 1, 1), 3, 2, 0, 0)
    x = basic_conv(ops, basic_conv(ops, x, "Conv2d_3b_1x1"), "Conv2d_4a_3x3")
    x = ops.max_pool(x, 3, 2, 0, 0)
    for letter in "bcd":
        x = _inception_a(ops, x, f"Mixed_5{letter}")
    x = _inception_b(ops, x, "Mixed_6a")
    for letter in "bcde":
        x = _inception_c(ops, x, f"Mixed_6{letter}")
    x = _inception_d(ops, x, "Mixed_7a")
    for letter in "bc":
        x = _inception_e(ops, x, f"Mixed_7{letter}")
    return ops.linear(ops.mean(x), "fc")


def _inception_a(ops: Operators, x: Array, name: str) -> Array:
    """5x5, and 3x3 twice."""
    return ops.concat(
        [
            basic_conv(ops, x, f"{name}.branch1x1"),
            _chain(ops, x, f"{name}.branch5x5", (0, 2)),
            _chain(ops, x, f"{name}.branch3x3dbl", (0, 1, 1)),
            _pooled(ops, x, name),
        ]
    )


def _inception_b(ops: Operators, x: Array, name: str) -> Array:
    """Half the height and width by 3x3, by 3x3 twice and by pooling."""
    return ops.concat(
        [
            basic_conv(ops, x, f"{name}.branch3x3", 2),
            _chain(ops, x, f"{name}.branch3x3dbl", (0, 1, 0), 2),
            ops.max_pool(x, 3, 2, 0, 0),
        ]
    )


def _inception_c(ops: Operators, x: Array, name: str) -> Array:
    """7x7, once and twice, as 1x7 and 7x1."""
    return ops.concat(
        [
            basic_conv(ops, x, f"{name}.branch1x1"),
            _chain(ops, x, f"{name}.branch7x7", (0, WIDE, TALL)),
            _chain(ops, x, f"{name}.branch7x7dbl", (0, TALL, WIDE, TALL, WIDE)),
            _pooled(ops, x, name),
        ]
    )


def _inception_d(ops: Operators, x: Array, name: str) -> Array:
    """Half the height and width by 3x3, behind 1x7 and 7x1 too, and by pooling."""
    return ops.concat(
        [
            _chain(ops, x, f"{name}.branch3x3", (0, 0), 2),
            _chain(ops, x, f"{name}.branch7x7x3", (0, WIDE, TALL, 0), 2),
            ops.max_pool(x, 3, 2, 0, 0),
        ]
    )


def _inception_e(ops: Operators, x: Array, name: str) -> Array:
    """1x3 and 3x1 side by side."""
    middle = basic_conv(ops, x, f"{name}.branch3x3_1")
    double = _chain(ops, x, f"{name}.branch3x3dbl", (0, 1))
    return ops.concat(
        [
            basic_conv(ops, x, f"{name}.branch1x1"),
            basic_conv(ops, middle, f"{name}.branch3x3_2a", 1, (0, 1)),
            basic_conv(ops, middle, f"{name}.branch3x3_2b", 1, (1, 0)),
            basic_conv(ops, double, f"{name}.branch3x3dbl_3a", 1, (0, 1)),
            basic_conv(ops, double, f"{name}.branch3x3dbl_3b", 1, (1, 0)),
            _pooled(ops, x, name),
        ]
    )


def _pooled(ops: Operators, x: Array, name: str) -> Array:
    return basic_conv(ops, ops.avg_pool(x, 3, 1, 1), f"{name}.branch_pool")


def _chain(ops: Operators, x: Array, name: str, pads: Sequence[Pad], stride: int = 1) -> Array:
    """Convolutions `name_1`, `name_2`, ... with these zeros around their images; the stride is the last one's."""
    for place, pad in enumerate(pads, start=1):
        x = basic_conv(ops, x, f"{name}_{place}", stride if place == len(pads) else 1, pad)
    return x
