"""VGG: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", 2015."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.compare.nets.alexnet import classifier
from convoy.compare.nets.operators import Array, Operators


def vgg(ops: Operators, x: Array, blocks: Sequence[int]) -> Array:
    """[n, 3, 224, 224] to [n, classes]; without dropout.

    Args:
        ops: the framework's operators.
        x: images.
        blocks: 3x3 convolutions before each pooling.
    """
    place = 0
    for convolutions in blocks:
        for _ in range(convolutions):
            x = ops.relu(ops.conv(x, f"features.{place}", 1, 1))
            place += 2  # the convolution's and the ReLU's
        x = ops.max_pool(x, 2, 2, 0, 0)
        place += 1
    return classifier(ops, x, "vgg", 7, (0, 3, 6))
