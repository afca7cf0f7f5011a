"""ATen operators that move elements: views, permutations, slices, concatenations, upsampling, padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Final

from convoy.engines.fusion.lowered_elementwise import constant
from convoy.engines.fusion.node_call import NEEDED, NodeCall, dimension, integer, integers, numeric
from convoy.engines.fusion.tensors import (
    Broadcast,
    Concatenated,
    Interpolated,
    NotFusibleError,
    Permuted,
    Repeated,
    Reshaped,
    Sliced,
    Tensor,
    broadcast,
)
from convoy.graph.ir import Arg, Ref

Rule = Callable[[NodeCall], Tensor | Sequence[Tensor]]

_LAST: Final = 2**62
"""Slices end there that end nowhere."""


def permuted(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Dimensions in another order."""
    return Permuted(tuple(tensor.shape[dim] for dim in order), tensor, tuple(order))


def reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Other sides."""
    return tensor if tensor.shape == shape else Reshaped(shape, tensor)


def sliced(tensor: Tensor, dim: int, start: int, end: int, step: int = 1) -> Tensor:
    """Positions of one dimension."""
    sides = (*tensor.shape[:dim], -(-(end - start) // step), *tensor.shape[dim + 1 :])
    return Sliced(sides, tensor, dim, start, step)


def _view(call: NodeCall) -> Tensor:
    """All operators whose result has the same elements in the same order: the result's shape says which."""
    if not call.node.args or not isinstance(call.node.args[0], Ref):
        raise NotFusibleError(f"does not know this form of {call.node.op}")
    return reshaped(call.tensor(call.node.args[0]), call.spec.shape)


def _permute(call: NodeCall) -> Tensor:
    x, order = call.read(x=NEEDED, dims=NEEDED)
    tensor = call.tensor(x)
    return permuted(tensor, [dimension(dim, len(tensor.shape)) for dim in integers(order)])


def _transpose(call: NodeCall) -> Tensor:
    x, *dims = call.read(x=NEEDED, a=0, b=1)
    tensor = call.tensor(x)
    order = list(range(len(tensor.shape)))
    if len(order) > 1:
        a, b = (dimension(dim, len(order)) for dim in dims)
        order[a], order[b] = order[b], order[a]
    return permuted(tensor, order)


def _expand(call: NodeCall) -> Tensor:
    x, *_ = call.read(x=NEEDED, size=NEEDED, implicit=False)
    return broadcast(call.tensor(x), call.spec.shape)


def _split(call: NodeCall) -> list[Tensor]:
    x, sizes, dim = call.read(x=NEEDED, sizes=NEEDED, dim=0)
    tensor = call.tensor(x)
    place = dimension(dim, len(tensor.shape))
    whole = tensor.shape[place]
    if call.operator == "chunk":
        size = -(-whole // integer(sizes))
        ends = [*range(size, whole, size), whole]
    elif isinstance(sizes, tuple):
        ends = list(accumulate(integers(sizes)))
    else:
        ends = [*range(integer(sizes), whole, integer(sizes)), whole]
    return [sliced(tensor, place, start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _slice(call: NodeCall) -> Tensor:
    x, dim, start, end, step = call.read(x=NEEDED, dim=0, start=None, end=None, step=1)
    tensor = call.tensor(x)
    place = dimension(dim, len(tensor.shape))
    whole = tensor.shape[place]
    first, last = (0 if start is None else integer(start), _LAST if end is None else integer(end))
    first, last = (min(max(value + whole if value < 0 else value, 0), whole) for value in (first, last))
    return sliced(tensor, place, first, max(first, last), integer(step))


def _narrow(call: NodeCall) -> Tensor:
    x, dim, start, length = call.read(x=NEEDED, dim=NEEDED, start=NEEDED, length=NEEDED)
    tensor = call.tensor(x)
    place = dimension(dim, len(tensor.shape))
    first = dimension(start, tensor.shape[place])
    return sliced(tensor, place, first, first + integer(length))


def _select(call: NodeCall) -> Tensor:
    x, dim, index = call.read(x=NEEDED, dim=NEEDED, index=NEEDED)
    tensor = call.tensor(x)
    place = dimension(dim, len(tensor.shape))
    first = dimension(index, tensor.shape[place])
    return reshaped(sliced(tensor, place, first, first + 1), call.spec.shape)


def _unbind(call: NodeCall) -> list[Tensor]:
    x, dim = call.read(x=NEEDED, dim=0)
    tensor = call.tensor(x)
    place = dimension(dim, len(tensor.shape))
    sides = (*tensor.shape[:place], *tensor.shape[place + 1 :])
    return [reshaped(sliced(tensor, place, at, at + 1), sides) for at in range(tensor.shape[place])]


def _tensors(call: NodeCall) -> tuple[list[Tensor], int]:
    items, dim = call.read(items=NEEDED, dim=0)
    if not isinstance(items, tuple):
        raise NotFusibleError(f"does not know this form of {call.node.op}")
    return [call.tensor(item) for item in items], dimension(dim, len(call.spec.shape))


def concatenated(parts: Sequence[Tensor], dim: int, shape: tuple[int, ...]) -> Tensor:
    """Values one behind the other; one alone as it is, empty ones left out."""
    kept = tuple(part for part in parts if len(part.shape) == len(shape) and part.shape[dim])
    return kept[0] if len(kept) == 1 else Concatenated(shape, kept, dim)


def _cat(call: NodeCall) -> Tensor:
    parts, dim = _tensors(call)
    return concatenated(parts, dim, call.spec.shape)


def _stack(call: NodeCall) -> Tensor:
    parts, dim = _tensors(call)
    sides = (*call.spec.shape[:dim], 1, *call.spec.shape[dim + 1 :])
    return concatenated([reshaped(part, sides) for part in parts], dim, call.spec.shape)


def _nearest(call: NodeCall) -> Tensor:
    """Upsampling to the nearest by whole factors."""
    tensor, shape = call.tensor(call.node.args[0]), call.spec.shape
    scales = [value for arg in (*call.node.args[2:], *(arg for _, arg in call.node.kwargs)) for value in _numbers(arg)]
    factors = tuple(made // given for made, given in zip(shape, tensor.shape, strict=True))
    whole = all(made == given * f for made, given, f in zip(shape, tensor.shape, factors, strict=True))
    if not whole or any(scale not in factors[2:] for scale in scales):
        raise NotFusibleError(f"upsamples to the nearest by whole factors, got {list(tensor.shape)} to {list(shape)}")
    return Repeated(shape, tensor, factors)


def _bilinear(call: NodeCall) -> Tensor:
    """Bilinear upsampling of images."""
    if call.overload == "vec":
        x, _, align, factors = call.read(x=NEEDED, size=None, align=NEEDED, factors=None)
        given = _numbers(factors) or [0.0, 0.0]
    else:
        x, _, align, *sides = call.read(x=NEEDED, size=NEEDED, align=NEEDED, scale_h=None, scale_w=None)
        given = [float(side) if isinstance(side, int | float) else 0.0 for side in sides]
    tensor, shape = call.tensor(x), call.spec.shape
    scales: list[float] = []
    for before, after, factor in zip(tensor.shape[2:], shape[2:], given, strict=True):
        if align:
            scales.append((before - 1) / (after - 1) if after > 1 else 0.0)
        else:
            scales.append(1.0 / factor if factor > 0 else before / after)
    return Interpolated(shape, tensor, (numeric(scales[0]), numeric(scales[1])), bool(align))


def _numbers(arg: Arg) -> list[float]:
    items = arg if isinstance(arg, tuple) else (arg,)
    return [float(item) for item in items if isinstance(item, int | float)]


def _pixel_shuffle(call: NodeCall) -> Tensor:
    """[n, c r r, h, w] to [n, c, h r, w r]."""
    x, factor = call.read(x=NEEDED, factor=NEEDED)
    tensor, r = call.tensor(x), integer(factor)
    *lead, c, h, w = tensor.shape
    wide = reshaped(tensor, (*lead, c // (r * r), r, r, h, w))
    first = len(lead)
    order = [*range(first), first, first + 3, first + 1, first + 4, first + 2]
    return reshaped(permuted(wide, order), call.spec.shape)


def _pixel_unshuffle(call: NodeCall) -> Tensor:
    """The inverse."""
    x, factor = call.read(x=NEEDED, factor=NEEDED)
    tensor, r = call.tensor(x), integer(factor)
    *lead, c, h, w = tensor.shape
    wide = reshaped(tensor, (*lead, c, h // r, r, w // r, r))
    first = len(lead)
    order = [*range(first), first, first + 2, first + 4, first + 1, first + 3]
    return reshaped(permuted(wide, order), call.spec.shape)


def _channel_shuffle(call: NodeCall) -> Tensor:
    x, groups = call.read(x=NEEDED, groups=NEEDED)
    tensor = call.tensor(x)
    n, c, *rest = tensor.shape
    g = integer(groups)
    wide = reshaped(tensor, (n, g, c // g, *rest))
    return reshaped(permuted(wide, [0, 2, 1, *range(3, len(rest) + 3)]), tensor.shape)


def _pad(call: NodeCall) -> Tensor:
    """Padding with a number, and cutting where it is negative."""
    x, pads, value = call.read(x=NEEDED, pads=NEEDED, value=0)
    tensor, sizes = call.tensor(x), integers(pads)
    for place in range(len(sizes) // 2):
        dim = len(tensor.shape) - 1 - place
        before, after = sizes[2 * place : 2 * place + 2]
        side = tensor.shape[dim]
        tensor = sliced(tensor, dim, max(0, -before), side - max(0, -after)) if min(before, after) < 0 else tensor
        ends = [(*tensor.shape[:dim], max(0, size), *tensor.shape[dim + 1 :]) for size in (before, after)]
        first, last = (constant(value, sides) for sides in ends)
        whole = (*tensor.shape[:dim], side + before + after, *tensor.shape[dim + 1 :])
        if max(before, after) > 0:
            tensor = concatenated([first, tensor, last], dim, whole)
    return tensor


def _repeat(call: NodeCall) -> Tensor:
    """Repetition along dimensions of side 1, and along new ones."""
    x, repeats = call.read(x=NEEDED, repeats=NEEDED)
    tensor, times = call.tensor(x), integers(repeats)
    sides = (1,) * (len(times) - len(tensor.shape)) + tensor.shape
    if any(side != 1 and count != 1 for side, count in zip(sides, times, strict=True)):
        raise NotFusibleError("repeats dimensions of side 1")
    return Broadcast(call.spec.shape, reshaped(tensor, sides))


MOVEMENT: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _view),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"), _nearest),
    "upsample_bilinear2d": _bilinear,
    "permute": _permute,
    "transpose.int": _transpose,
    "t": _transpose,
    "expand": _expand,
    "slice.Tensor": _slice,
    "narrow.default": _narrow,
    "select.int": _select,
    "unbind.int": _unbind,
    "cat": _cat,
    "stack": _stack,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "channel_shuffle": _channel_shuffle,
    "constant_pad_nd": _pad,
    "repeat": _repeat,
}
