"""EfficientNet: Tan and Le, "EfficientNet: rethinking model scaling for convolutional neural networks", 2019."""

from __future__ import annotations

from typing import Final

from convoy.compare.nets.mobilenet import conv_norm
from convoy.compare.nets.operators import Array, Operators

STAGES: Final = ((3, 1, 1), (3, 2, 2), (5, 2, 2), (3, 2, 3), (5, 1, 3), (5, 2, 4), (3, 1, 1))
"""Side of the depthwise filters, stride of the first block, and blocks, of each stage."""


def efficientnet_b0(ops: Operators, x: Array) -> Array:
    """[n, 3, h, w] to [n, classes]; without dropout and without stochastic depth."""
    x = ops.silu(conv_norm(ops, x, "features.0", 2, 1))
    for stage, (side, stride, blocks) in enumerate(STAGES, start=1):
        for block in range(blocks):
            name = f"features.{stage}.{block}.block"
            x = _block(ops, x, name, side, stride if block == 0 else 1, widen=stage > 1, add=block > 0)
    x = ops.silu(conv_norm(ops, x, f"features.{len(STAGES) + 1}"))
    return ops.linear(ops.mean(x), "classifier.1")


def _block(ops: Operators, x: Array, name: str, side: int, stride: int, *, widen: bool, add: bool) -> Array:
    """MobileNetV2's block with SiLU, and with squeeze-and-excitation behind the depthwise convolution."""
    y, place = x, 0
    if widen:
        y, place = ops.silu(conv_norm(ops, y, f"{name}.0")), 1
    y = ops.silu(conv_norm(ops, y, f"{name}.{place}", stride, side // 2))
    y = _squeeze_and_excitation(ops, y, f"{name}.{place + 1}")
    y = conv_norm(ops, y, f"{name}.{place + 2}")
    return ops.add(x, y) if add else y


def _squeeze_and_excitation(ops: Operators, x: Array, name: str) -> Array:
    """Hu et al., "Squeeze-and-excitation networks", 2018: a gate for each channel, from the means of all."""
    gate = ops.silu(ops.conv(ops.mean(x, keep=True), f"{name}.fc1"))
    return ops.multiply(x, ops.sigmoid(ops.conv(gate, f"{name}.fc2")))
