"""Names for nodes: where in the model the operation was called, so that a person finds the layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

from torch import fx


class ModulePathNames:
    """Names the calls of an exported graph by the path of the module that made them.

    A module that contains no other and calls one operator gives its path (`layer1.0.conv1`); anything else gets the
    operator's name behind the path (`layer1.0.add`). An operator whose path was lost is named after its weight.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._paths = {node: path_of(node) for node in nodes if node.op == "call_function"}
        paths = set(self._paths.values())
        self._inner = {path[: match.start()] for path in paths for match in re.finditer(r"\.", path)} | {""}
        self._ops: defaultdict[str, set[str]] = defaultdict(set)
        for node, path in self._paths.items():
            if not is_bookkeeping(node):
                self._ops[path].add(operator_name(node))

    def name(self, node: fx.Node) -> str:
        """The name wanted for a call; it need not be free."""
        path, op = self._paths[node], operator_name(node)
        if path not in self._inner and len(self._ops[path]) == 1:
            return path
        weight = self._weight_path(node)
        return weight or f"{path}.{op}" if path or weight else op

    def _weight_path(self, node: fx.Node) -> str:
        """Path of the module whose weight a layer reads."""
        if operator_name(node) not in ("conv2d", "conv3d", "linear") or len(node.args) < 2:
            return ""
        weight = node.args[1]
        while isinstance(weight, fx.Node) and weight.op == "call_function" and len(weight.all_input_nodes) == 1:
            weight = weight.all_input_nodes[0]  # a cast, say
        target = weight.meta.get("convoy_target", "") if isinstance(weight, fx.Node) else ""
        return target.removesuffix(".weight") if target.endswith(".weight") else ""


def path_of(node: fx.Node) -> str:
    """Path of the module that made a call; empty for the model itself or where the exporter lost it."""
    stack = cast("dict[str, tuple[str, Any]]", node.meta.get("nn_module_stack") or {})
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return re.sub(r"@\d+", "", path)


def operator_name(node: fx.Node) -> str:
    """The operator's bare name: `add`, `batch_norm`."""
    parts = str(node.target).split(".")
    name = (parts[1] if len(parts) == 3 else parts[-1]).strip("_")
    return "batch_norm" if "batch_norm" in name else name


def is_bookkeeping(node: fx.Node) -> bool:
    """Whether a call computes nothing: it picks one of several results, or asserts."""
    name = str(node.target)
    return "getitem" in name or "_assert" in name or "sym_constrain" in name
