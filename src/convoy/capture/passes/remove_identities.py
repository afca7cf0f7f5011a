"""Remove what does nothing to the numbers: dropout out of training, copies, casts to the same dtype, views of one shape."""

from __future__ import annotations

from typing import Final

from convoy.capture.draft import Draft
from convoy.graph.ir import Node, Ref

_DROPOUTS: Final = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout"})
_COPIES: Final = frozenset({"clone", "contiguous", "_to_copy", "lift_fresh_copy", "to"})
_ALIASES: Final = frozenset({"alias", "detach", "lift_fresh", "lift"})
# They move or select elements, or average them: with one shape before and after, each element is still its own.
_RESHAPES: Final = frozenset({"view", "_unsafe_view", "reshape", "expand", "squeeze", "unsqueeze"})
_POOLS: Final = frozenset(
    {
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool2d_backward",
        "adaptive_avg_pool3d",
    }
)


def remove_identities(draft: Draft) -> None:
    """Drop the nodes that give what they read.

    Which memory a value lies in is no part of a graph, nor its memory format: engines choose both. Pooling to the size that
    is there already is in AlexNet and VGG at 224 x 224.

    before: %d = aten.dropout.default(%x, 0.5, False); %c = aten.clone.default(%d); %y = aten.relu.default(%c)
    -->
    after:  %y = aten.relu.default(%x)

    A copy that is returned stays one where, without it, the caller would get an input, a constant or another output again.
    """
    names: dict[str, str] = {}
    copied: set[str] = set()
    kept: list[Node] = []
    for node in draft.nodes:
        source = _source(draft, node)
        if source is None:
            kept.append(node)
            continue
        output = node.outputs[0]
        names[output] = names.get(source, source)
        if source in copied or _operator(node) in _COPIES:
            copied.add(output)
    draft.nodes = kept
    for name in names:
        del draft.specs[name]
    returned = list(draft.outputs)
    draft.rename(names)
    for index, name in enumerate(returned):
        source = draft.outputs[index]
        if name in copied and (source in draft.inputs or source in draft.constants or source in draft.outputs[:index]):
            draft.outputs[index] = add_copy(draft, source, name)


def add_copy(draft: Draft, source: str, wanted: str) -> str:
    """Add a node that copies a value; gives the copy's name."""
    name = draft.unique(wanted)
    draft.specs[name] = draft.specs[source]
    draft.nodes.append(Node(name, "aten.clone.default", (Ref(source),), (), (name,)))
    return name


def _operator(node: Node) -> str:
    parts = node.op.split(".")
    return parts[1] if len(parts) == 3 else ""


def _source(draft: Draft, node: Node) -> str | None:
    """The value that a node gives unchanged; None where it computes something."""
    name = _operator(node)
    if not node.args or not isinstance(node.args[0], Ref) or not node.outputs[0]:
        return None
    source = node.args[0].name
    same = draft.specs[source] == draft.specs[node.outputs[0]]
    if not same:
        return None
    if name in _DROPOUTS:
        return source if node.args[-1] is False or ("train", False) in node.kwargs else None
    if name in _COPIES | _ALIASES | _RESHAPES | _POOLS or _moves_nothing(node, name):
        return source
    return None


def _moves_nothing(node: Node, name: str) -> bool:
    if name == "slice":
        return len(node.args) < 5 or node.args[4] == 1
    if name == "permute":
        return isinstance(node.args[1], tuple) and node.args[1] == tuple(range(len(node.args[1])))
    return False
