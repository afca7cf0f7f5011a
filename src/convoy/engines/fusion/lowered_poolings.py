"""ATen's poolings of images and volumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from convoy.engines.fusion.node_call import NEEDED, NodeCall
from convoy.engines.fusion.tensors import NotFusibleError, Tensor, Window, Windowed
from convoy.graph.ir import Arg
from convoy.regions.pool import pool_of

Mean = Callable[[Tensor, Sequence[int]], Tensor]
"""The mean over some dimensions, with sides of 1."""

IMAGES: Final = ("adaptive_avg_pool2d", "avg_pool2d", "max_pool2d", "max_pool2d_with_indices")
VOLUMES: Final = ("adaptive_avg_pool3d", "avg_pool3d", "max_pool3d", "max_pool3d_with_indices")


def pooled(call: NodeCall, mean: Mean) -> Tensor:
    """A pooling; where its window is the whole image, a mean.

    Raises:
        NotFusibleError: another form of the operator.
    """
    window = _image_window(call) if call.operator in IMAGES else _volume_window(call)
    tensor = call.tensor(call.node.args[0])
    sides = tensor.shape[2:]
    whole = tuple(size for size, _, _ in window.sides) == sides and set(call.spec.shape[2:]) == {1}
    padded = any(pad for _, _, pad in window.sides)
    if whole and window.kind == "avg" and not padded and math.prod(sides) > 1:
        return mean(tensor, range(2, len(tensor.shape)))
    if all((size, stride) == (1, 1) for size, stride, _ in window.sides):
        return tensor
    return Windowed(call.spec.shape, tensor, window)


def _image_window(call: NodeCall) -> Window:
    pool = pool_of(call.graph, call.node)
    if pool is None:
        raise NotFusibleError(f"does not know this form of {call.node.op}")
    sides = ((pool.window_h, pool.stride_h, pool.pad_h), (pool.window_w, pool.stride_w, pool.pad_w))
    return Window("max" if pool.kind == "max" else "avg", sides, pool.count_include_pad)


def _volume_window(call: NodeCall) -> Window:
    tensor = call.tensor(call.node.args[0])
    unknown = NotFusibleError(f"does not know this form of {call.node.op}")
    if len(tensor.shape) != 5 or any(call.node.outputs[1:]):
        raise unknown
    if call.operator == "adaptive_avg_pool3d":
        _, size = call.read(x=NEEDED, size=NEEDED)
        if size != (1, 1, 1) or math.prod(tensor.shape) == 0:
            raise unknown
        return Window("avg", tuple((side, side, 0) for side in tensor.shape[2:]), counted=False)
    counted = False
    if call.operator == "avg_pool3d":
        _, size, stride, pad, _, given, divisor = call.read(
            x=NEEDED, size=NEEDED, stride=(), pad=0, ceil=False, counted=True, divisor=None
        )
        counted = given is True
        if divisor is not None:
            raise unknown
    else:
        _, size, stride, pad, dilation, _ = call.read(x=NEEDED, size=NEEDED, stride=(), pad=0, dilation=1, ceil=False)
        if _triple(dilation) != (1, 1, 1):
            raise unknown
    pads = _triple(pad)
    sides = tuple(zip(_triple(size), _triple(stride or size), pads, strict=True))
    if any(len(side) != 3 or side[0] < 1 or side[1] < 1 for side in sides) or len(sides) != 3:
        raise unknown
    return Window("avg" if call.operator == "avg_pool3d" else "max", sides, counted and any(pads))


def _triple(arg: Arg) -> tuple[int, ...]:
    """ATen's sizes: an integer, or a tuple of one or three; nothing for other arguments."""
    sides = arg if isinstance(arg, tuple) else (arg,)
    found = tuple(side for side in sides if isinstance(side, int))
    return found * 3 if len(found) == 1 else found if len(found) == 3 else (0, 0, 0)
