"""Operators of ONNX that move, cut, join and resize."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from convoy.zoo.onnx_model.value import (
    Array,
    Inputs,
    OnnxNode,
    Operator,
    UnsupportedOnnxError,
    array,
    axes_of,
    integers,
    optional,
    tensor,
)


def _shape(node: OnnxNode, inputs: Inputs) -> Array:
    """`Shape`: an array of the host, because shapes are known while the graph is read."""
    sizes = list(tensor(inputs[0]).shape)
    end = node.get("end")
    return np.array(sizes[int(node.get("start", 0)) : None if end is None else int(end)], dtype=np.int64)


def _size(_node: OnnxNode, inputs: Inputs) -> Array:
    return np.array(tensor(inputs[0]).numel(), dtype=np.int64)


def _reshape(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, sizes = tensor(inputs[0]), integers(inputs[1], "a shape")
    if not node.get("allowzero", 0):
        sizes = [x.shape[at] if size == 0 else size for at, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, axis = tensor(inputs[0]), int(node.get("axis", 1))
    axis = axis + x.dim() if axis < 0 else axis
    if axis == 1 and x.dim() > 1:
        return x.flatten(1)
    rows = 1
    for size in x.shape[:axis]:
        rows *= size
    return x.reshape(rows, -1)


def _transpose(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x = tensor(inputs[0])
    return x.permute(list(node.get("perm", reversed(range(x.dim())))))


def _squeeze(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, axes = tensor(inputs[0]), axes_of(node, inputs)
    return x.squeeze() if axes is None else x.squeeze([axis % x.dim() for axis in axes])


def _unsqueeze(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, axes = tensor(inputs[0]), axes_of(node, inputs) or []
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _concat(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    return torch.cat([tensor(value) for value in inputs], int(node.get("axis")))


def _split(node: OnnxNode, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    x, axis = tensor(inputs[0]), int(node.get("axis", 0))
    given = node.get("split") if node.get("split") is not None else optional(inputs, 1)
    if given is None:
        count = int(node.get("num_outputs", len(node.outputs)))
        return torch.split(x, -(-x.shape[axis] // count), axis)
    old: list[int] | None = node.get("split")
    sizes = old if old is not None else integers(given, "sizes of a split")
    return torch.split(x, sizes, axis)


def _slice(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x = tensor(inputs[0])
    if node.get("starts") is not None:
        starts, ends, axes, steps = list(node.get("starts")), list(node.get("ends")), node.get("axes"), None
    else:
        starts, ends = integers(inputs[1], "starts of a slice"), integers(inputs[2], "ends of a slice")
        axes, steps = optional(inputs, 3), optional(inputs, 4)
        axes = None if axes is None else integers(axes, "axes of a slice")
        steps = None if steps is None else integers(steps, "steps of a slice")
    for at, axis in enumerate(axes if axes is not None else range(len(starts))):
        step = 1 if steps is None else steps[at]
        if step < 1:
            picked = list(range(x.shape[axis]))[slice(starts[at], ends[at] if ends[at] > -(1 << 60) else None, step)]
            x = x.index_select(axis, torch.tensor(picked))
        else:
            x = x[(slice(None),) * (int(axis) % x.dim()) + (slice(starts[at], min(ends[at], (1 << 62)), step),)]
    return x


def _gather(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, axis, index = tensor(inputs[0]), int(node.get("axis", 0)), inputs[1]
    if isinstance(index, torch.Tensor):
        return torch.index_select(x, axis, index.reshape(-1)).reshape(
            *x.shape[:axis], *index.shape, *x.shape[axis % x.dim() + 1 :]
        )
    places = array(index, "an index")
    if places.ndim == 0:
        return x.select(axis, int(places))
    if (
        places.ndim == 1
        and list(places) == list(range(int(places[0]), int(places[0]) + len(places)))
        and places[0] >= 0
    ):
        return x.narrow(axis, int(places[0]), len(places))
    found = x.index_select(axis, torch.tensor(places.reshape(-1)))
    axis %= x.dim()
    return found.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


def _pad(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, mode = tensor(inputs[0]), str(node.get("mode", "constant"))
    pads = list(node.get("pads")) if node.get("pads") is not None else integers(inputs[1], "pads")
    axes = optional(inputs, 3)
    half = len(pads) // 2
    every = [axis % x.dim() for axis in integers(axes, "axes of pads")] if axes is not None else list(range(half))
    ends = {axis: (pads[at], pads[half + at]) for at, axis in enumerate(every)}
    value = node.get("value", 0.0)
    if optional(inputs, 2) is not None:
        value = array(inputs[2], "the value of pads").reshape(-1)[0]
    around = [pad for axis in reversed(range(x.dim())) for pad in ends.get(axis, (0, 0))]
    while around[-2:] == [0, 0] and len(around) > 2:
        around = around[:-2]
    if mode == "constant":
        return functional.pad(x, around, value=float(value))
    if mode not in ("reflect", "edge"):
        raise UnsupportedOnnxError(f"Pad with mode {mode}")
    return functional.pad(x, around, "reflect" if mode == "reflect" else "replicate")


def _resize(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`Resize` and `Upsample` of images by the modes that `interpolate` has."""
    x, mode = tensor(inputs[0]), str(node.get("mode", "nearest"))
    older = node.operator == "Upsample" or node.version < 11
    scales = optional(inputs, 1 if older else 2)
    sizes = None if older else optional(inputs, 3)
    where = str(node.get("coordinate_transformation_mode", "asymmetric" if older else "half_pixel"))
    if node.get("axes") is not None or mode not in ("nearest", "linear", "cubic"):
        raise UnsupportedOnnxError(f"Resize with mode {mode}" + (" and axes" if node.get("axes") else ""))
    rounding = str(node.get("nearest_mode", "floor" if older else "round_prefer_floor"))
    # A resize of nearest values is interpolate's for whole factors, whatever the rounding.
    given = _target(x, scales, sizes)
    if mode == "nearest":
        whole = all(new % old == 0 for new, old in zip(given, x.shape[2:], strict=True))
        if not whole and (where, rounding) != ("asymmetric", "floor"):
            raise UnsupportedOnnxError(f"Resize of nearest values by {where} and {rounding}")
        return functional.interpolate(x, size=given, mode="nearest")
    if where not in ("half_pixel", "pytorch_half_pixel", "align_corners") or node.get("antialias", 0):
        raise UnsupportedOnnxError(f"Resize with {where}")
    if mode == "cubic" and abs(float(node.get("cubic_coeff_a", -0.75)) + 0.75) > 1e-6:
        raise UnsupportedOnnxError("Resize with another coefficient than -0.75")
    name = {3: "linear", 4: "bilinear", 5: "trilinear"}[x.dim()] if mode == "linear" else "bicubic"
    return functional.interpolate(x, size=given, mode=name, align_corners=where == "align_corners")


def _target(x: torch.Tensor, scales: Any, sizes: Any) -> list[int]:
    """Height and width of the result."""
    if sizes is not None and array(sizes, "sizes of Resize").size:
        found = integers(sizes, "sizes of Resize")
    elif scales is not None:
        factors = array(scales, "scales of Resize").reshape(-1)
        found = [int(np.floor(size * float(factor))) for size, factor in zip(x.shape, factors, strict=True)]
    else:
        raise UnsupportedOnnxError("Resize without sizes and scales")
    if found[:2] != list(x.shape[:2]):
        raise UnsupportedOnnxError("Resize of batch or channels")
    return found[2:]


def _depth_to_space(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, block = tensor(inputs[0]), int(node.get("blocksize"))
    if str(node.get("mode", "DCR")) == "CRD":
        return functional.pixel_shuffle(x, block)
    n, c, h, w = x.shape
    return (
        x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, -1, h * block, w * block)
    )


def _space_to_depth(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, block = tensor(inputs[0]), int(node.get("blocksize"))
    n, c, h, w = x.shape
    return (
        x.reshape(n, c, h // block, block, w // block, block)
        .permute(0, 3, 5, 1, 2, 4)
        .reshape(n, -1, h // block, w // block)
    )


def _expand(_node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, sizes = tensor(inputs[0]), integers(inputs[1], "a shape")
    return x.expand(_broadcast(list(x.shape), sizes))


def _broadcast(left: list[int], right: list[int]) -> list[int]:
    """The sizes of two shapes together; a side of 1 takes the other's."""
    rank = max(len(left), len(right))
    pairs = zip([1] * (rank - len(left)) + left, [1] * (rank - len(right)) + right, strict=True)
    return [b if a == 1 else a for a, b in pairs]


def _tile(_node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    return tensor(inputs[0]).repeat(integers(inputs[1], "repeats"))


def _constant_of_shape(node: OnnxNode, inputs: Inputs) -> Array:
    value = node.get("value")
    filler = np.zeros(1, np.float32) if value is None else np.asarray(value)
    return np.full(integers(inputs[0], "a shape"), filler.reshape(-1)[0], filler.dtype)


SHAPES: Final[dict[str, Operator]] = {
    "Shape": _shape, "Size": _size, "Reshape": _reshape, "Flatten": _flatten, "Transpose": _transpose, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Concat": _concat, "Split": _split, "Slice": _slice, "Gather": _gather, "Pad": _pad,
    "Resize": _resize, "Upsample": _resize, "DepthToSpace": _depth_to_space, "SpaceToDepth": _space_to_depth,
    "Expand": _expand, "Tile": _tile, "ConstantOfShape": _constant_of_shape,
}  # fmt: skip
"""ONNX's operator → its function."""
