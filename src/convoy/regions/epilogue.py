"""The nodes that may follow a convolution or linear layer in one kernel: a residual addition, then an activation.

A node is added only if the value before it has one reader and is not returned. So a region hides no value that is needed
elsewhere, and since a chain of single readers has one exit, it is convex.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoy.graph.ir import Graph, Node, Ref
from convoy.problem import Epilogue
from convoy.regions.activation import activation_of


@dataclass(frozen=True, slots=True)
class LayerChain:
    """A layer's node with some of the nodes that follow it.

    Attributes:
        nodes: the layer, then the addition and the activation if it has them; in graph order.
        residual: the value added; empty if there is none.
        activation: the epilogue's name of it.
        result: the chain's result.
    """

    nodes: tuple[Node, ...]
    residual: str
    activation: str
    result: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(node.name for node in self.nodes)

    def has_dynamic_weight(self, graph: Graph) -> bool:
        """Whether the layer's weight is no constant: it changes from call to call."""
        return graph.values[list(self.nodes[0].refs())[1]].kind != "constant"

    def epilogue(self) -> Epilogue:
        """The epilogue; a bias is always included."""
        return Epilogue(self.nodes[0].args[2] is not None, bool(self.residual), self.activation)


def chains(graph: Graph, layer: Node) -> list[LayerChain]:
    """All valid chains of a `conv2d`, `conv3d` or `linear` node: alone, + activation, + addition, + both. The longest is last.

    None for a layer whose x is a constant, for a linear layer whose weight or bias the graph computes, and if the graph
    computes only one of weight and bias: no engine packs those.
    """
    kinds = [graph.values[name].kind for name in layer.refs()]
    constant = [kind == "constant" for kind in kinds[1:]]
    if kinds[0] == "constant" or any(constant) != all(constant) or (layer.op == "linear" and not all(constant)):
        return []
    alone = LayerChain((layer,), "", "none", layer.outputs[0])
    added = _with_residual(graph, alone)
    found = [alone, _with_activation(graph, alone), added, _with_activation(graph, added) if added else None]
    return [chain for chain in found if chain]


def only_reader(graph: Graph, value: str) -> Node | None:
    """The only node that reads a value which is not returned; None if there are more or none."""
    users = graph.users(value)
    return users[0] if len(users) == 1 and value not in graph.outputs else None


def _with_residual(graph: Graph, chain: LayerChain) -> LayerChain | None:
    """Before: %z = aten.add.Tensor(%y, %other).  After: the layer's epilogue adds %other, of %y's shape and dtype."""
    node = only_reader(graph, chain.result)
    if node is None or node.op != "aten.add.Tensor" or len(node.args) != 2 or dict(node.kwargs).get("alpha", 1) != 1:
        return None
    others = [arg.name for arg in node.args if isinstance(arg, Ref) and arg.name != chain.result]
    if len(others) != 1 or graph.values[others[0]].kind == "constant":
        return None
    specs = {graph.values[name].spec for name in (chain.result, others[0], node.outputs[0])}
    return LayerChain((*chain.nodes, node), others[0], "none", node.outputs[0]) if len(specs) == 1 else None


def _with_activation(graph: Graph, chain: LayerChain) -> LayerChain | None:
    """Before: %z = aten.relu.default(%y).  After: the layer's epilogue applies it."""
    node = only_reader(graph, chain.result)
    if node is None or list(node.refs()) != [chain.result] or not activation_of(node):
        return None
    if graph.values[node.outputs[0]].spec != graph.values[chain.result].spec:
        return None
    return LayerChain((*chain.nodes, node), chain.residual, activation_of(node), node.outputs[0])
