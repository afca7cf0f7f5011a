"""AlexNet, GoogLeNet and ResNet-50 once, over the few operators that each framework has: torchvision's nets, weight by weight.

A framework gives an `Operators` (its own layers or functions, in its own layout) and gets its own graph of the net. Names are
those of torchvision's parameters, and sizes are read from the weights, so that weights are copied over by name. Sources:
Krizhevsky, "One weird trick", 2014; Szegedy et al., "Going deeper with convolutions", 2015; He et al., "Deep residual
learning", 2016, with the stride in the 3x3 convolution as torchvision has it (keras.applications has it in the 1x1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

Array = Any
"""A framework's own tensor, in its own layout."""


class Operators(Protocol):
    """What a framework must do. Images are logically [n, c, h, w]; weights are torch's, found by name."""

    def conv(self, x: Array, name: str, stride: int = 1, pad: int = 0) -> Array:
        """Convolution with `name.weight` [k, c, r, s] and, where there is one, `name.bias`."""
        ...

    def batch_norm(self, x: Array, name: str, eps: float) -> Array:
        """Batch norm with `name.weight`, `.bias`, `.running_mean`, `.running_var`; in training by the batch's statistics."""
        ...

    def relu(self, x: Array) -> Array:
        """Rectifier."""
        ...

    def max_pool(self, x: Array, size: int, stride: int, low: int, high: int) -> Array:
        """Max pooling; `low` rows and columns of -inf before the image, `high` after it."""
        ...

    def mean(self, x: Array) -> Array:
        """[n, c]: the mean over height and width."""
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

    def affine(self, x: Array, scale: Sequence[float], shift: Sequence[float]) -> Array:
        """Each channel times its scale plus its shift."""
        ...

    def height(self, x: Array) -> int:
        """Height of a feature map, pixels."""
        ...


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
    if ops.height(x) != 6:  # torchvision averages to 6x6 here, which at 224 pixels does nothing
        raise ValueError(f"alexnet is defined here for feature maps of 6x6 before its classifier, not {ops.height(x)}")
    x = ops.flatten(x)
    x = ops.relu(ops.linear(x, "classifier.1"))
    x = ops.relu(ops.linear(x, "classifier.4"))
    return ops.linear(x, "classifier.6")


def resnet50(ops: Operators, x: Array) -> Array:
    """[n, 3, h, w] to [n, classes]."""
    x = ops.relu(ops.batch_norm(ops.conv(x, "conv1", 2, 3), "bn1", 1e-5))
    x = ops.max_pool(x, 3, 2, 1, 1)
    for layer, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            x = _bottleneck(ops, x, f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1, first=block == 0)
    return ops.linear(ops.mean(x), "fc")


def _bottleneck(ops: Operators, x: Array, name: str, stride: int, *, first: bool) -> Array:
    y = ops.relu(ops.batch_norm(ops.conv(x, f"{name}.conv1"), f"{name}.bn1", 1e-5))
    y = ops.relu(ops.batch_norm(ops.conv(y, f"{name}.conv2", stride, 1), f"{name}.bn2", 1e-5))
    y = ops.batch_norm(ops.conv(y, f"{name}.conv3"), f"{name}.bn3", 1e-5)
    if first:
        x = ops.batch_norm(ops.conv(x, f"{name}.downsample.0", stride), f"{name}.downsample.1", 1e-5)
    return ops.relu(ops.add(y, x))


def googlenet(ops: Operators, x: Array) -> Array:
    """[n, 3, h, w] to [n, classes]; without the auxiliary classifiers and without dropout."""
    x = _ceil_pool(ops, _basic(ops, x, "conv1", 2, 3), 3, 2)
    x = _basic(ops, _basic(ops, x, "conv2"), "conv3", 1, 1)
    x = _ceil_pool(ops, x, 3, 2)
    x = _inception(ops, _inception(ops, x, "inception3a"), "inception3b")
    x = _ceil_pool(ops, x, 3, 2)
    for letter in "abcde":
        x = _inception(ops, x, f"inception4{letter}")
    x = _ceil_pool(ops, x, 2, 2)
    x = _inception(ops, _inception(ops, x, "inception5a"), "inception5b")
    return ops.linear(ops.mean(x), "fc")


def transform_input(ops: Operators, x: Array) -> Array:
    """What torchvision's GoogLeNet with trained weights does first: from ImageNet's statistics to its own."""
    means, stds = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return ops.affine(x, [s / 0.5 for s in stds], [(m - 0.5) / 0.5 for m in means])


def _basic(ops: Operators, x: Array, name: str, stride: int = 1, pad: int = 0) -> Array:
    return ops.relu(ops.batch_norm(ops.conv(x, f"{name}.conv", stride, pad), f"{name}.bn", 1e-3))


def _ceil_pool(ops: Operators, x: Array, size: int, stride: int) -> Array:
    """Max pooling whose last window may hang over the edge (torch's ceil_mode): as much -inf after the image."""
    height = ops.height(x)
    outputs = -(-(height - size) // stride) + 1
    return ops.max_pool(x, size, stride, 0, max(0, (outputs - 1) * stride + size - height))


def _inception(ops: Operators, x: Array, name: str) -> Array:
    return ops.concat(
        [
            _basic(ops, x, f"{name}.branch1"),
            _basic(ops, _basic(ops, x, f"{name}.branch2.0"), f"{name}.branch2.1", 1, 1),
            _basic(ops, _basic(ops, x, f"{name}.branch3.0"), f"{name}.branch3.1", 1, 1),  # 3x3, as torchvision has it
            _basic(ops, ops.max_pool(x, 3, 1, 1, 1), f"{name}.branch4.1"),
        ]
    )


NETS: Final[dict[str, Callable[[Operators, Array], Array]]] = {
    "alexnet": alexnet,
    "googlenet": googlenet,
    "resnet50": resnet50,
}
"""The nets by their name in torchvision."""
