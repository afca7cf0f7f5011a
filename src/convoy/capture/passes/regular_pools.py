"""Turn an adaptive average pooling whose windows are all alike into an ordinary one: more kernels, and steady gradients."""

from __future__ import annotations

from typing import Final

from convoy.capture.draft import Draft
from convoy.graph.ir import Arg, Node, Ref

FORWARD: Final = frozenset({"aten.adaptive_avg_pool2d.default", "aten._adaptive_avg_pool2d.default"})
BACKWARD: Final = "aten._adaptive_avg_pool2d_backward.default"


def regular_pools(draft: Draft) -> None:
    """Rewrite poolings, and their gradients, whose output's sides divide the input's.

    before: input %x: fp32[2,4,8,8]
            %y: fp32[2,4,2,2] = aten._adaptive_avg_pool2d.default(%x, (2, 2))
            %dx = aten._adaptive_avg_pool2d_backward.default(%dy, %x)
    -->
    after:  %y: fp32[2,4,2,2] = aten.avg_pool2d.default(%x, (4, 4), (4, 4), (0, 0), False, True, None)
            %dx = aten.avg_pool2d_backward.default(%dy, %x, (4, 4), (4, 4), (0, 0), False, True, None)

    PyTorch's adaptive gradient adds up by atomic operations on a GPU, so that its bits differ from run to run; its own step still
    has it (`Captured.as_pytorch`).
    """
    draft.nodes = [_rewritten(draft, node) for node in draft.nodes]


def _rewritten(draft: Draft, node: Node) -> Node:
    if node.op in FORWARD:
        wide, narrow, op = node.args[0], node.outputs[0], "aten.avg_pool2d.default"
        tensors: tuple[Arg, ...] = (wide,)
    elif node.op == BACKWARD:
        wide, narrow, op = node.args[1], _name(node.args[0]), "aten.avg_pool2d_backward.default"
        tensors = (node.args[0], wide)
    else:
        return node
    window = _window(draft, _name(wide), narrow)
    if window is None:
        return node
    return Node(node.name, op, (*tensors, window, window, (0, 0), False, True, None), (), node.outputs)


def _window(draft: Draft, wide: str, narrow: str) -> tuple[int, int] | None:
    """Height and width of each window; None where they are not all alike."""
    large, small = (draft.specs[name].shape if name else () for name in (wide, narrow))
    if len(large) != 4 or len(small) != 4:
        return None
    height, width, rows, columns = *large[2:], *small[2:]
    if not rows or not columns or height % rows or width % columns or not height or not width:
        return None
    return height // rows, width // columns


def _name(argument: Arg) -> str:
    return argument.name if isinstance(argument, Ref) else ""
