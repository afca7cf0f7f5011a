"""GoogLeNet with batch norm: Szegedy et al., "Going deeper with convolutions", 2015."""

from __future__ import annotations

from convoy.compare.nets.operators import Array, Operators, Pad


def googlenet(ops: Operators, x: Array) -> Array:
    """[n, 3, h, w] to [n, classes]; without the auxiliary classifiers and without dropout."""
    x = _ceil_pool(ops, basic_conv(ops, x, "conv1", 2, 3), 3, 2)
    x = basic_conv(ops, basic_conv(ops, x, "conv2"), "conv3", 1, 1)
    x = _ceil_pool(ops, x, 3, 2)
    x = _inception(ops, _inception(ops, x, "inception3a"), "inception3b")
    x = _ceil_pool(ops, x, 3, 2)
    for letter in "abcde":
        x = _inception(ops, x, f"inception4{letter}")
    x = _ceil_pool(ops, x, 2, 2)
    x = _inception(ops, _inception(ops, x, "inception5a"), "inception5b")
    return ops.linear(ops.mean(x), "fc")


def transform_input(ops: Operators, x: Array) -> Array:
    """First step of torchvision's GoogLeNet and Inception v3 with trained weights: from ImageNet's statistics to their own."""
    means, stds = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return ops.affine(x, [s / 0.5 for s in stds], [(m - 0.5) / 0.5 for m in means])


def basic_conv(ops: Operators, x: Array, name: str, stride: int = 1, pad: Pad = 0) -> Array:
    """Convolution, batch norm, ReLU: torchvision's BasicConv2d, of which GoogLeNet and Inception v3 are made."""
    return ops.relu(ops.batch_norm(ops.conv(x, f"{name}.conv", stride, pad), f"{name}.bn", 1e-3))


def _ceil_pool(ops: Operators, x: Array, size: int, stride: int) -> Array:
    """Max pooling whose last window may hang over the edge (torch's ceil_mode): as much -inf after the image."""
    height = ops.height(x)
    outputs = -(-(height - size) // stride) + 1
    return ops.max_pool(x, size, stride, 0, max(0, (outputs - 1) * stride + size - height))


def _inception(ops: Operators, x: Array, name: str) -> Array:
    return ops.concat(
        [
            basic_conv(ops, x, f"{name}.branch1"),
            basic_conv(ops, basic_conv(ops, x, f"{name}.branch2.0"), f"{name}.branch2.1", 1, 1),
            # 3x3, as torchvision has it
            basic_conv(ops, basic_conv(ops, x, f"{name}.branch3.0"), f"{name}.branch3.1", 1, 1),
            basic_conv(ops, ops.max_pool(x, 3, 1, 1, 1), f"{name}.branch4.1"),
        ]
    )
