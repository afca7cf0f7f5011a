"""ResNet: He et al., "Deep residual learning for image recognition", 2015.

The stride is in the 3x3 convolution, as torchvision has it (keras.applications has it in the 1x1).
"""

from __future__ import annotations

from convoy.compare.nets.operators import Array, Operators


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
