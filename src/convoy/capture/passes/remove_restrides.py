"""Take views by strides out of a traced graph where they are but reshapes: a graph's values have no strides."""

from __future__ import annotations

import torch
from torch import fx

_STRIDED = torch.ops.aten.as_strided.default
_SCATTER = torch.ops.aten.as_strided_scatter.default
_COPY = torch.ops.aten.copy.default
_VIEW = torch.ops.aten.view.default

MOST_ELEMENTS = 1 << 24
"""Larger values are left: their map of positions would take longer to make than is worth it."""


def remove_restrides(graph: fx.Graph) -> None:
    """Rewrite what PyTorch's tracer leaves behind in channels_last, where adaptive average pooling sets its result's strides.

    before: %s = aten.as_strided.default(%mean, (2, 64, 1, 1), (64, 1, 64, 64))
    -->
    after:  %s = aten.view.default(%mean, (2, 64, 1, 1))

    before: %z = aten.new_zeros.default(%g, (128,)); %v = aten.as_strided.default(%z, (2, 64), (64, 1), 0)
            %c = aten.copy.default(%v, %g); %t = aten.as_strided_scatter.default(%z, %c, (2, 64), (64, 1), 0)
            %s = aten.as_strided.default(%t, (2, 64, 1, 1), (64, 1, 1, 1), 0)
    -->
    after:  %s = aten.view.default(%g, (2, 64, 1, 1))

    Only where the positions show that every element stays in its logical place; any other view by strides stays, and capture
    refuses it.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _STRIDED:
            continue
        source = _reshaped(node)
        if source is None:
            continue
        with graph.inserting_before(node):
            view = graph.call_function(_VIEW, (source, list(node.meta["val"].shape)))
        view.meta.update(node.meta)
        node.replace_all_uses_with(view)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _reshaped(node: fx.Node) -> fx.Node | None:
    """The value whose elements a view by strides has in their own order; None where it moves or repeats some."""
    base = node.args[0]
    if not isinstance(base, fx.Node) or node.meta["val"].numel() > MOST_ELEMENTS:
        return None
    source, where = base, base.meta["val"]
    size, stride, offset = list(where.shape), list(where.stride()), where.storage_offset()
    if base.target is _SCATTER:
        inner = base.args[1]
        if not isinstance(inner, fx.Node):
            return None
        source = _copied(inner)
        size, stride, offset = _geometry(base, 2)
    positions = _positions(size, stride, offset, _geometry(node, 1))
    if positions is None or source.meta["val"].numel() != positions.numel():
        return None
    return source if torch.equal(positions.reshape(-1), torch.arange(positions.numel())) else None


def _copied(node: fx.Node) -> fx.Node:
    """What a copy onto a value of the same shape and dtype gives."""
    if node.target is not _COPY or not isinstance(node.args[1], fx.Node):
        return node
    source = node.args[1]
    made, given = node.meta["val"], source.meta["val"]
    return source if (made.shape, made.dtype) == (given.shape, given.dtype) else node


def _geometry(node: fx.Node, first: int) -> tuple[list[int], list[int], int]:
    """Sizes, strides and offset, as a view by strides takes them from its argument `first` on."""
    size, stride, *rest = node.args[first:]
    return list(size), list(stride), int(rest[0] or 0) if rest else 0  # pyright: ignore[reportArgumentType, reportUnknownVariableType]


def _positions(
    size: list[int], stride: list[int], offset: int, view: tuple[list[int], list[int], int]
) -> torch.Tensor | None:
    """For each element of a view of a storage, the element of a value that lies there; None outside of the value."""
    span = 1 + offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    reach = 1 + view[2] + sum((n - 1) * s for n, s in zip(view[0], view[1], strict=True))
    count = 1
    for side in size:
        count *= side
    if not count or max(span, reach) > MOST_ELEMENTS:
        return None
    storage = torch.full((max(span, reach),), -1)
    storage.as_strided(size, stride, offset).copy_(torch.arange(count).reshape(size))
    return storage.as_strided(*view)
