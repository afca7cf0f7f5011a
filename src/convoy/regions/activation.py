"""Activations that a kernel may apply to what it writes: ATen operators → the epilogue's words.

aten.relu.default(%x) · aten.clamp_min.default(%x, 0) · aten.clamp.default(%x, 0)      -->  relu
aten.relu6.default(%x) · aten.hardtanh.default(%x, 0, 6) · aten.clamp.default(%x, 0, 6) -->  relu6
aten.silu · aten.hardswish · aten.hardsigmoid · aten.sigmoid                            -->  the same word
aten.gelu.default(%x) or with approximate="none": the exact form, by erf                -->  gelu
"""

from __future__ import annotations

from typing import Final

from convoy.graph.ir import Arg, Node, Ref

_PLAIN: Final = {
    "aten.relu.default": "relu",
    "aten.relu6.default": "relu6",
    "aten.silu.default": "silu",
    "aten.hardswish.default": "hardswish",
    "aten.hardsigmoid.default": "hardsigmoid",
    "aten.sigmoid.default": "sigmoid",
}

# Operators with bounds: names and defaults of the arguments behind the first.
_BOUNDED: Final[dict[str, tuple[tuple[str, Arg], ...]]] = {
    "aten.hardtanh.default": (("min_val", -1), ("max_val", 1)),
    "aten.clamp.default": (("min", None), ("max", None)),
    "aten.clamp_min.default": (("min", None),),
}


def activation_of(node: Node) -> str:
    """The epilogue's name of the activation that a node applies to its first argument; empty if it is none."""
    if not node.args or not isinstance(node.args[0], Ref):
        return ""
    if node.op in _PLAIN:
        return _PLAIN[node.op] if len(node.args) == 1 and not node.kwargs else ""
    if node.op == "aten.gelu.default":
        return "gelu" if _arguments(node, (("approximate", "none"),)) == ("none",) else ""
    if node.op in _BOUNDED:
        low, high = (*_arguments(node, _BOUNDED[node.op]), None)[:2]
        if isinstance(low, (int, float)) and low == 0:
            return "relu" if high is None else "relu6" if isinstance(high, (int, float)) and high == 6 else ""
    return ""


def _arguments(node: Node, names: tuple[tuple[str, Arg], ...]) -> tuple[Arg, ...]:
    """The arguments after the first, whether positional or by keyword."""
    given = dict(zip((name for name, _ in names), node.args[1:], strict=False)) | dict(node.kwargs)
    return tuple(given.get(name, default) for name, default in names)
