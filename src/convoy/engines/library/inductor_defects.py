"""What Inductor computes wrongly, so that its engine refuses it: the gradient of an average pooling that counts its padding.

`aten.avg_pool2d_backward` and `avg_pool3d_backward` divide by the whole window where padding counts (`torch._inductor.lowering`
of PyTorch 2.13). With `ceil_mode` the last window may go beyond the padded image, and PyTorch counts no places there: windows of
2 x 2 on 5 x 10 pixels give the last row half of its gradient. Inductor's forward pass is right. `inductor.whole` takes no
gradients.
"""

from __future__ import annotations

from typing import Final

from convoy.graph.ir import Arg, Graph, Node

_GRADIENTS: Final = {"aten.avg_pool2d_backward.default": 2, "aten.avg_pool3d_backward.default": 3}
"""Sides of the windows by operator."""

_ARGUMENTS: Final = (
    "grad_output",
    "self",
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)
"""Names of the operators' arguments in their order."""


def wrong_in_inductor(graph: Graph) -> str:
    """Why Inductor would compute a subgraph wrongly; empty where no fault of it is known."""
    found = next((node.op for node in graph.nodes if _divides_by_places_outside(graph, node)), "")
    return f"Inductor divides by places outside of the padded image: {found}" if found else ""


def _divides_by_places_outside(graph: Graph, node: Node) -> bool:
    """Whether it is such a gradient, of windows that go beyond the padded image."""
    sides = _GRADIENTS.get(node.op)
    if sides is None:
        return False
    given = {**dict(zip(_ARGUMENTS, node.args, strict=False)), **dict(node.kwargs)}
    if given.get("divisor_override") is not None or not (given.get("ceil_mode") and given.get("count_include_pad")):
        return False
    made, image = (graph.values[name].spec.shape[-sides:] for name in [*node.refs()][:2])
    window, padding = (_sides(given.get(name), sides) for name in ("kernel_size", "padding"))
    stride = _sides(given.get("stride"), sides) or window
    along = zip(made, image, window, stride, padding or (0,) * sides, strict=True)
    return any((count - 1) * step + length > size + 2 * pad for count, size, length, step, pad in along)


def _sides(given: Arg, sides: int) -> tuple[int, ...]:
    """An argument as an integer for each side; empty where it is left out."""
    if isinstance(given, int):
        return (given,) * sides
    found = tuple(side for side in given if isinstance(side, int)) if isinstance(given, tuple) else ()
    return found * sides if len(found) == 1 else found
