"""MobileNetV2: Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", 2018."""

from __future__ import annotations

from typing import Final

from convoy.compare.nets.operators import Array, Operators

STAGES: Final = ((1, 1), (2, 2), (2, 3), (2, 4), (1, 3), (2, 3), (1, 1))
"""Stride of the first block, and blocks, of each stage."""


def mobilenet_v2(ops: Operators, x: Array) -> Array:
    """[n, 3, h, w] to [n, classes]; without dropout."""
    x = ops.relu6(conv_norm(ops, x, "features.0", 2, 1))
    place = 1
    for stride, blocks in STAGES:
        for block in range(blocks):
            x = _block(ops, x, f"features.{place}.conv", stride if block == 0 else 1, widen=place > 1, add=block > 0)
            place += 1
    x = ops.relu6(conv_norm(ops, x, f"features.{place}"))
    return ops.linear(ops.mean(x), "classifier.1")


def conv_norm(ops: Operators, x: Array, name: str, stride: int = 1, pad: int = 0) -> Array:
    """Convolution and batch norm: torchvision's Conv2dNormActivation before its activation."""
    return ops.batch_norm(ops.conv(x, f"{name}.0", stride, pad), f"{name}.1", 1e-5)


def _block(ops: Operators, x: Array, name: str, stride: int, *, widen: bool, add: bool) -> Array:
    """An inverted residual: 1x1 to more channels but in the first block, 3x3 depthwise, 1x1 to fewer."""
    y, place = x, 0
    if widen:
        y, place = ops.relu6(conv_norm(ops, y, f"{name}.0")), 1
    y = ops.relu6(conv_norm(ops, y, f"{name}.{place}", stride, 1))
    y = ops.batch_norm(ops.conv(y, f"{name}.{place + 1}"), f"{name}.{place + 2}", 1e-5)
    return ops.add(x, y) if add else y
