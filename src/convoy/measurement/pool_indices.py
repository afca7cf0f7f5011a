"""Indices of a maximum pooling, drawn at random, for subgraphs that read them.

The backward pass of a pooling adds each gradient to the element that an index names. If all indices were equal, kernels with
atomic operations would serialize, and kernels that look for indices inside their windows would find none.
"""

from __future__ import annotations

import torch

from convoy.graph.ir import MAX_POOL_BACKWARD, Arg, Graph, Node, Ref
from convoy.regions.casts import is_cast

_X, _KERNEL, _STRIDE, _PADDING, _DILATION, _INDICES = 1, 2, 3, 4, 5, 7
"""Places of the operator's arguments: grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices."""


def readers_of_indices(graph: Graph) -> dict[str, Node]:
    """The backward poolings that read an input of the graph as their indices, directly or through a cast, by the input's name."""
    found: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op != MAX_POOL_BACKWARD or not isinstance(given := node.args[_INDICES], Ref):
            continue
        maker = graph.producer(given.name)
        source = next(iter(maker.refs()), "") if maker is not None and is_cast(maker) else given.name
        if source in graph.inputs:
            found[source] = node
    return found


def draw_indices(graph: Graph, node: Node, generator: torch.Generator) -> torch.Tensor:
    """Indices that a pooling of random values would return.

    Args:
        graph: the subgraph.
        node: its backward pooling.
        generator: the random generator; its device is the result's.

    Returns:
        int64 [n, c, p, q], to be cast to the input's dtype: row · width + column of a pixel in each window, all pixels of a
        window equally likely.
    """
    x, indices = node.args[_X], node.args[_INDICES]
    assert isinstance(x, Ref)
    assert isinstance(indices, Ref)
    height, width = graph.values[x.name].spec.shape[-2:]
    shape = graph.values[indices.name].spec.shape
    kernel, padding, dilation = (_pair(node.args[place]) for place in (_KERNEL, _PADDING, _DILATION))
    stride = _pair(node.args[_STRIDE] or kernel)
    rows = _along(height, shape, 2, (kernel[0], stride[0], padding[0], dilation[0]), generator)
    columns = _along(width, shape, 3, (kernel[1], stride[1], padding[1], dilation[1]), generator)
    return rows * width + columns


def _along(
    size: int, shape: tuple[int, ...], axis: int, window: tuple[int, int, int, int], generator: torch.Generator
) -> torch.Tensor:
    """Coordinates along one axis, inside window and image."""
    taps, stride, padding, dilation = window
    start = torch.arange(shape[axis], device=generator.device) * stride - padding
    least = (-start).clamp(min=0).add(dilation - 1).div(dilation, rounding_mode="floor")
    most = (size - 1 - start).div(dilation, rounding_mode="floor").clamp(max=taps - 1)
    view = [-1 if place == axis else 1 for place in range(len(shape))]
    drawn = torch.randint(0, 1 << 20, shape, generator=generator, device=generator.device)
    tap = least.view(view) + drawn % (most - least + 1).view(view)
    return start.view(view) + tap * dilation


def _pair(arg: Arg) -> tuple[int, int]:
    """Both values of a size that may be given as one."""
    sides = arg if isinstance(arg, tuple) else (arg,)
    first, last = sides[0], sides[-1]
    assert isinstance(first, int)
    assert isinstance(last, int)
    return first, last
