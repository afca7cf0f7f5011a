"""Let the convolution pad: a node of its own would write the whole image once more."""

from __future__ import annotations

from dataclasses import replace

from convoy.capture.draft import Draft
from convoy.graph.ir import Arg, Node, Ref


def fold_pad(draft: Draft) -> None:
    """Fold symmetric zero padding into the convolutions that read it, where nothing else does.

    before: %p = aten.constant_pad_nd.default(%x, (2, 2, 1, 1), 0.0); %y = conv2d(%p, %w, %b, (1, 1), (0, 0), (1, 1), 1)
    -->
    after:  %y = conv2d(%x, %w, %b, (1, 1), (1, 2), (1, 1), 1)

    Padding that differs between two sides of an image stays a node: a ConvProblem has one number for both.
    """
    readers: dict[str, list[Node]] = {}
    for node in draft.nodes:
        for name in set(node.refs()):
            readers.setdefault(name, []).append(node)
    pads: dict[str, tuple[str, int, int]] = {}
    for index, node in enumerate(draft.nodes):
        pad = _symmetric_pad(draft, node)
        output = node.outputs[0]
        if (
            pad is not None
            and output not in draft.outputs
            and all(_pads_for(n, output) for n in readers.get(output, []))
        ):
            pads[output] = pad
        elif node.op == "conv2d" and isinstance(node.args[0], Ref) and node.args[0].name in pads:
            draft.nodes[index] = _padded(node, *pads[node.args[0].name])
    draft.nodes = [node for node in draft.nodes if node.outputs[0] not in pads]


def _pads_for(node: Node, value: str) -> bool:
    return node.op == "conv2d" and list(node.refs()).count(value) == 1 and node.args[0] == Ref(value)


def _padded(node: Node, x: str, pad_h: int, pad_w: int) -> Node:
    _, weight, bias, stride, padding, *rest = node.args
    assert isinstance(padding, tuple)
    before_h, before_w = padding
    assert isinstance(before_h, int)
    assert isinstance(before_w, int)
    return replace(node, args=(Ref(x), weight, bias, stride, (before_h + pad_h, before_w + pad_w), *rest))


def _symmetric_pad(draft: Draft, node: Node) -> tuple[str, int, int] | None:
    """(x, pad_h, pad_w) of a node that pads the two last sides of a 4-D value with zeros, alike on both ends."""
    x = node.args[0]
    if node.op not in ("aten.constant_pad_nd.default", "aten.pad.default") or not isinstance(x, Ref):
        return None
    sizes, *rest = node.args[1:]
    given = dict(zip(("mode", "value") if node.op == "aten.pad.default" else ("value",), rest, strict=False))
    given |= dict(node.kwargs)
    if given.get("mode", "constant") != "constant" or given.get("value") not in (None, 0):
        return None
    ends = _integers(sizes)
    if len(draft.specs[x.name].shape) != 4 or len(ends) > 4 or min(ends, default=-1) < 0:
        return None
    left, right, top, bottom = (*ends, 0, 0, 0, 0)[:4]
    return (x.name, top, left) if left == right and top == bottom else None


def _integers(arg: Arg) -> tuple[int, ...]:
    return tuple(item for item in arg if isinstance(item, int)) if isinstance(arg, tuple) else ()
