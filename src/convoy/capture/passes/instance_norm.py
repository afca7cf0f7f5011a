"""Instance norms as group norms with one channel a group, or as batch norms where they use running statistics."""

from __future__ import annotations

from typing import Final

from convoy.capture.draft import Draft
from convoy.graph.ir import Arg, Node, Ref

INSTANCE_NORM: Final = "aten.instance_norm.default"
_NAMES: Final = ("input", "weight", "bias", "mean", "var", "input_stats", "momentum", "eps", "cudnn")


def instance_norm(draft: Draft) -> None:
    """Rewrite instance norms.

    before: %y = aten.instance_norm.default(%x, %g, %h, None, None, True, 0.1, 1e-05, True)            x: [n, c, ...]
    -->
    after:  %y = aten.group_norm.default(%x, c, %g, %h, 1e-05, True)

    before: %y = aten.instance_norm.default(%x, %g, %h, %mean, %var, False, 0.1, 1e-05, True)
    -->
    after:  %y = aten.batch_norm.default(%x, %g, %h, %mean, %var, False, 0.1, 1e-05, True)

    PyTorch copies x to [1, n * c, ...] for an instance norm, which takes channels_last away. It stays where it changes running
    statistics, and where the dtypes differ.
    """
    for index, node in enumerate(draft.nodes):
        if node.op == INSTANCE_NORM and len(node.args) == len(_NAMES) and not node.kwargs:
            draft.nodes[index] = _rewritten(draft, node) or node


def _rewritten(draft: Draft, node: Node) -> Node | None:
    given: dict[str, Arg] = dict(zip(_NAMES, node.args, strict=True))
    x, eps, cudnn = given["input"], given["eps"], given["cudnn"]
    if not isinstance(x, Ref) or len(draft.specs[x.name].shape) < 3:
        return None
    affine, statistics = (given["weight"], given["bias"]), (given["mean"], given["var"])
    if given["input_stats"] is False and all(isinstance(arg, Ref) for arg in statistics):
        return Node(node.name, "aten.batch_norm.default", node.args, (), node.outputs)
    spec = draft.specs[x.name]
    dtypes = {draft.specs[arg.name].dtype for arg in affine if isinstance(arg, Ref)}
    if given["input_stats"] is not True or statistics != (None, None) or not dtypes <= {spec.dtype}:
        return None
    args: tuple[Arg, ...] = (x, spec.shape[1], *affine, eps, cudnn)
    return Node(node.name, "aten.group_norm.default", args, (), node.outputs)
