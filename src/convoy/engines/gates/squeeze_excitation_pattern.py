"""A squeeze-and-excitation block as a subgraph: which nodes it consists of, and its sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from convoy.engines.subgraph import averages_images, parse_subgraph
from convoy.graph.ir import Graph, Node, Ref
from convoy.problem import SubgraphProblem
from convoy.regions.activation import activation_of
from convoy.regions.epilogue import only_reader


@dataclass(frozen=True, slots=True)
class SqueezeExcitation:
    """The computation of a subgraph: y = relu(x · outer(w2 · inner(w1 · mean(x) + b1) + b2) + residual), by image.

    Attributes:
        images: images.
        pixels: pixels of an image.
        channels: channels of x.
        hidden: channels between the two layers.
        inner: activation of the first layer, by its name in an epilogue (`none` if there is none).
        outer: activation of the second layer: the gate's.
        biases: whether the first and the second layer have a bias.
        residual: whether a second input of x's shape is added.
        relu: whether a ReLU follows.
        dtype: of all values.
    """

    images: int
    pixels: int
    channels: int
    hidden: int
    inner: str
    outer: str
    biases: tuple[bool, bool]
    residual: bool
    relu: bool
    dtype: str

    @staticmethod
    def of(problem: SubgraphProblem) -> SqueezeExcitation | None:
        """The computation of a subgraph; None if it is no squeeze-and-excitation block with all of its nodes."""
        graph = parse_subgraph(problem.text)
        found = next((match for node in graph.nodes if (match := match_block(graph, node)) is not None), None)
        if found is None or graph.outputs != (found.result,) or {node.name for node in graph.nodes} != set(found.nodes):
            return None
        wanted = [found.x, found.residual] if found.residual else [found.x]
        constants = [name for name in (found.weights[0], found.biases[0], found.weights[1], found.biases[1]) if name]
        if [*graph.inputs] != wanted or [value.name for value in graph.constants()] != constants:
            return None
        return SqueezeExcitation.of_match(graph, found)

    @staticmethod
    def of_match(graph: Graph, found: BlockMatch) -> SqueezeExcitation:
        """The computation of nodes of a graph."""
        n, c, h, w = graph.values[found.x].spec.shape
        return SqueezeExcitation(
            images=n,
            pixels=h * w,
            channels=c,
            hidden=graph.values[found.weights[0]].spec.shape[0],
            inner=found.inner,
            outer=found.outer,
            biases=(bool(found.biases[0]), bool(found.biases[1])),
            residual=bool(found.residual),
            relu=found.relu,
            dtype=graph.values[found.x].spec.dtype,
        )


@dataclass(frozen=True, slots=True)
class BlockMatch:
    """Nodes and values of a block in a graph."""

    nodes: tuple[str, ...]
    x: str
    weights: tuple[str, str]
    biases: tuple[str, str]
    inner: str
    outer: str
    result: str
    residual: str = ""
    relu: bool = False


def squeeze_excitations(graph: Graph) -> Iterator[Sequence[str]]:
    """The nodes of each block, with the residual and the ReLU behind it where they are there, and without them."""
    for node in graph.nodes:
        gated = match_block(graph, node, tail=False)
        if gated is not None:
            yield gated.nodes
            whole = match_block(graph, node)
            if whole is not None and whole != gated:
                yield whole.nodes


def match_block(graph: Graph, pool: Node, *, tail: bool = True) -> BlockMatch | None:
    """The block whose mean a node takes, or None. With `tail` the sum and the ReLU behind the product belong to it."""
    x = pool.args[0] if pool.args else None
    if not isinstance(x, Ref) or not averages_images(graph, pool):
        return None
    first = layer_1x1(graph, pool.outputs[0])
    inner = _activated(graph, first[0]) if first else None
    second = layer_1x1(graph, inner[0].outputs[0]) if inner else None
    outer = _activated(graph, second[0]) if second else None
    if first is None or inner is None or second is None or outer is None or outer[1] == "none":
        return None
    gate = outer[0].outputs[0]
    product = only_reader(graph, gate)
    if product is None or product.op != "aten.mul.Tensor" or {*product.args} != {Ref(x.name), Ref(gate)}:
        return None
    if len({graph.values[name].spec.dtype for name in (x.name, gate, *product.outputs)}) > 1:
        return None
    if graph.values[product.outputs[0]].spec != graph.values[x.name].spec:
        return None
    layers = [node.name for node in (pool, first[0], inner[0], second[0], outer[0])]
    nodes = tuple(dict.fromkeys((*layers, product.name)))
    weights, biases = (first[1], second[1]), (first[2], second[2])
    found = BlockMatch(nodes, x.name, weights, biases, inner[1], outer[1], product.outputs[0])
    return with_tail(graph, found) if tail else found


def layer_1x1(graph: Graph, value: str) -> tuple[Node, str, str] | None:
    """The 1x1 convolution with constant weights that alone reads a value: node, weight, bias or an empty text.

    Its stride is not looked at: for a value of one pixel, any is right.
    """
    node = only_reader(graph, value)
    if node is None or node.op != "conv2d" or node.args[0] != Ref(value):
        return None
    _, weight, bias, _, padding, _, groups = node.args
    if not isinstance(weight, Ref) or tuple(padding) != (0, 0) or groups != 1:  # type: ignore[arg-type] - a pair of integers
        return None
    names = [arg.name for arg in (weight, bias) if isinstance(arg, Ref)]
    spec = graph.values[value].spec
    constant = all(graph.values[n].kind == "constant" and graph.values[n].spec.dtype == spec.dtype for n in names)
    if not constant or graph.values[weight.name].spec.shape[1:] != (spec.shape[1], 1, 1):
        return None
    return node, weight.name, names[1] if len(names) > 1 else ""


def _activated(graph: Graph, layer: Node) -> tuple[Node, str]:
    """The node that applies a layer's activation, and its name in an epilogue. Without one: the layer itself and `none`."""
    reader = only_reader(graph, layer.outputs[0])
    name = activation_of(reader) if reader is not None else ""
    return (reader, name) if reader is not None and name else (layer, "none")


def with_tail(graph: Graph, found: BlockMatch) -> BlockMatch:
    """The block with the sum and the ReLU behind it, as far as they are there."""
    total = only_reader(graph, found.result)
    if total is not None and total.op == "aten.add.Tensor" and len(total.args) == 2 and not total.kwargs:
        others = [arg.name for arg in total.args if isinstance(arg, Ref) and arg.name != found.result]
        spec = graph.values[found.result].spec
        if len(others) == 1 and graph.values[others[0]].spec == spec and _is_apart(graph, others[0], found):
            found = BlockMatch(
                (*found.nodes, total.name), found.x, found.weights, found.biases, found.inner, found.outer,
                total.outputs[0], others[0],
            )  # fmt: skip
    last = only_reader(graph, found.result)
    if last is not None and activation_of(last) == "relu":
        return BlockMatch(
            (*found.nodes, last.name), found.x, found.weights, found.biases, found.inner, found.outer,
            last.outputs[0], found.residual, relu=True,
        )  # fmt: skip
    return found


def _is_apart(graph: Graph, value: str, found: BlockMatch) -> bool:
    """Whether a value is another one than x, no constant, and does not depend on the block."""
    if value == found.x or graph.values[value].kind == "constant":
        return False
    behind = {found.nodes[0]}
    for node in graph.nodes:
        makers = {maker.name for name in node.refs() if (maker := graph.producer(name)) is not None}
        if makers & behind:
            behind.add(node.name)
    maker = graph.producer(value)
    return maker is None or maker.name not in behind
