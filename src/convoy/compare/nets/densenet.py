"""DenseNet: Huang et al., "Densely connected convolutional networks", 2017."""

from __future__ import annotations

from convoy.compare.nets.operators import Array, Operators


def densenet121(ops: Operators, x: Array) -> Array:
    """[n, 3, h, w] to [n, classes]."""
    x = ops.relu(ops.batch_norm(ops.conv(x, "features.conv0", 2, 3), "features.norm0", 1e-5))
    x = ops.max_pool(x, 3, 2, 1, 1)
    for block, layers in enumerate((6, 12, 24, 16), start=1):
        if block > 1:
            x = _transition(ops, x, f"features.transition{block - 1}")
        for layer in range(1, layers + 1):
            x = _dense_layer(ops, x, f"features.denseblock{block}.denselayer{layer}")
    x = ops.relu(ops.batch_norm(x, "features.norm5", 1e-5))
    return ops.linear(ops.mean(x), "classifier")


def _dense_layer(ops: Operators, x: Array, name: str) -> Array:
    """The image with the layer's new channels behind it."""
    y = ops.conv(ops.relu(ops.batch_norm(x, f"{name}.norm1", 1e-5)), f"{name}.conv1")
    y = ops.conv(ops.relu(ops.batch_norm(y, f"{name}.norm2", 1e-5)), f"{name}.conv2", 1, 1)
    return ops.concat([x, y])


def _transition(ops: Operators, x: Array, name: str) -> Array:
    """Half the channels, half the height and width."""
    x = ops.conv(ops.relu(ops.batch_norm(x, f"{name}.norm", 1e-5)), f"{name}.conv")
    return ops.avg_pool(x, 2, 2)
