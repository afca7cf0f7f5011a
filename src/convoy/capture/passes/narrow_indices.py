"""Keep the places of a pooling's maxima in two bytes instead of eight between forward and backward pass."""

from __future__ import annotations

from typing import Final

from convoy.capture.draft import Draft, renamed
from convoy.graph.ir import MAX_POOL_BACKWARD, Graph, Node, Ref, Symbol
from convoy.problem import TensorSpec
from convoy.regions.casts import is_cast

FORWARD: Final = "aten.max_pool2d_with_indices.default"
_PIXELS_OF_I16: Final = 1 << 15
"""An index counts the pixels of one image: up to 181x181 fit into 16 bits with a sign, all others into 32."""


def narrow_indices(draft: Draft) -> None:
    """Rewrite the indices of poolings whose backward pass alone reads them.

    before: %v, %i = aten.max_pool2d_with_indices.default(%x, ...)
            %dx = aten.max_pool2d_with_indices_backward.default(%dy, %x, ..., %i)
    -->
    after:  %v, %i = aten.max_pool2d_with_indices.default(%x, ...)
            %i.narrow = aten._to_copy.default(%i, dtype=dtype.i16)
            %i.wide = aten._to_copy.default(%i.narrow, dtype=dtype.i64)
            %dx = aten.max_pool2d_with_indices_backward.default(%dy, %x, ..., %i.wide)

    The casts cost nothing where a kernel does them beside the pooling: it writes, keeps and reads a quarter of the bytes.
    """
    wanted = _narrowed(draft)
    nodes: list[Node] = []
    for node in draft.nodes:
        read = [name for name in dict.fromkeys(node.refs()) if name in wanted]
        for name in read:
            wide = draft.unique(f"{name}.wide")
            draft.specs[wide] = draft.specs[name]
            nodes.append(_cast(wanted[name], wide, "i64"))
            node = renamed(node, {name: wide})
        nodes.append(node)
        made = [(name, wanted[name]) for name in node.outputs if name in wanted]
        nodes += [_cast(name, narrow, draft.specs[narrow].dtype) for name, narrow in made]
    draft.nodes = nodes


def index_casts(graph: Graph) -> frozenset[str]:
    """Names of the nodes that `narrow_indices` has put into a graph: PyTorch itself keeps the indices as they are."""
    found: set[str] = set()
    for node in graph.nodes:
        indices = node.outputs[1] if node.op == FORWARD and len(node.outputs) > 1 else ""
        for narrow in graph.users(indices) if indices else ():
            wide = graph.users(narrow.outputs[0])
            backward = [reader.op == MAX_POOL_BACKWARD for one in wide for reader in graph.users(one.outputs[0])]
            if backward and all(backward) and all(map(is_cast, (narrow, *wide))):
                found.update(one.name for one in (narrow, *wide))
    return frozenset(found)


def _narrowed(draft: Draft) -> dict[str, str]:
    """New values for the indices that only backward poolings read, by the indices' names."""
    readers: dict[str, list[Node]] = {}
    for node in draft.nodes:
        for name in set(node.refs()):
            readers.setdefault(name, []).append(node)
    found: dict[str, str] = {}
    for node in draft.nodes:
        if node.op != FORWARD or len(node.outputs) < 2 or not node.outputs[1]:
            continue
        indices, x = node.outputs[1], node.args[0]
        alone = all(
            reader.op == MAX_POOL_BACKWARD and reader.args[-1] == Ref(indices) for reader in readers.get(indices, [])
        )
        if indices in draft.outputs or not readers.get(indices) or not alone or not isinstance(x, Ref):
            continue
        height, width = draft.specs[x.name].shape[-2:]
        narrow = draft.unique(f"{indices}.narrow")
        dtype = "i16" if height * width <= _PIXELS_OF_I16 else "i32"
        draft.specs[narrow] = TensorSpec(draft.specs[indices].shape, dtype)
        found[indices] = narrow
    return found


def _cast(source: str, made: str, dtype: str) -> Node:
    return Node(made, "aten._to_copy.default", (Ref(source),), (("dtype", Symbol(f"dtype.{dtype}")),), (made,))
