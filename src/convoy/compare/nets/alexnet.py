"""AlexNet as one column: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014."""

from __future__ import annotations

from convoy.compare.nets.operators import Array, Operators


def alexnet(ops: Operators, x: Array) -> Array:
    """[n, 3, 224, 224] to [n, classes]; without dropout."""
    for name, stride, pad, pooled in (
        ("features.0", 4, 2, True),
        ("features.3", 1, 2, True),
        ("features.6", 1, 1, False),
        ("features.8", 1, 1, False),
        ("features.10", 1, 1, True),
    ):
        x = ops.relu(ops.conv(x, name, stride, pad))
        x = ops.max_pool(x, 3, 2, 0, 0) if pooled else x
    return classifier(ops, x, "alexnet", 6, (1, 4, 6))


def classifier(ops: Operators, x: Array, net: str, side: int, layers: tuple[int, int, int]) -> Array:
    """Three linear layers over feature maps [n, c, side, side], as AlexNet and VGG have them; to [n, classes]."""
    if ops.height(x) != side:  # torchvision averages to this side first, which at 224 pixels does nothing
        raise ValueError(
            f"{net} is defined here for feature maps of {side}x{side} before its classifier, not {ops.height(x)}"
        )
    x = ops.flatten(x)
    for layer in layers[:-1]:
        x = ops.relu(ops.linear(x, f"classifier.{layer}"))
    return ops.linear(x, f"classifier.{layers[-1]}")
