"""Weight gradients of linear layers as products of two values, so that processes may exchange the values instead.

before: %t = aten.t.default(%dy)                         dy: [rows, out features]
        %m = aten.mm.default(%t, %x)                     x: [rows, in features]
        %g = aten._to_copy.default(%m, dtype=dtype.fp32)
        return %g
-->
after:  WeightProduct(gradient=g, left=dy, right=x, nodes=(t, m, g))
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from convoy.graph.ir import Graph, Node, Ref
from convoy.problem import TensorSpec
from convoy.regions.casts import is_cast

FLOPS_PER_BYTE: Final = {"cuda half": 2000, "cuda": 200, "cpu": 50}
"""Operations of a matrix product in the time of one byte of a transfer: a GPU's 400 and 40 TFLOP/s (half types; fp32) over 200
GB/s (`schedule.collectives.BYTES_PER_US`), and two CPU cores' 50 GFLOP/s over 1 GB/s. Rough values, which decide only where the
difference is large."""


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """A weight gradient, left^T x right, summed over the rows of a batch.

    Attributes:
        gradient: name of the graph's result.
        left: name of the gradient of the layer's output, [rows, out features].
        right: name of the layer's input, [rows, in features].
        nodes: names of the nodes that compute the gradient from these two, and nothing else.
    """

    gradient: str
    left: str
    right: str
    nodes: tuple[str, ...]

    def pays(self, graph: Graph, processes: int, device: str) -> bool:
        """Whether gathering both values and multiplying all rows takes less time than an all-reduce of the gradient.

        Args:
            graph: the graph.
            processes: that train together.
            device: `cpu` or `cuda`.
        """
        left, right, gradient = (graph.values[name].spec for name in (self.left, self.right, self.gradient))
        others = processes - 1
        gathered = others * (left.size_bytes + right.size_bytes)
        reduced = 2 * others / processes * gradient.size_bytes
        flops = 2 * others * left.shape[0] * left.shape[1] * right.shape[1]
        return gathered + flops / FLOPS_PER_BYTE[_rate(left, device)] < reduced


def weight_products(graph: Graph, gradients: Collection[str]) -> list[WeightProduct]:
    """The products among some of a graph's results, in the results' order.

    A result is one if it is made by a matrix product whose inner dimension is that of the rows, and by transpositions and casts
    that nobody else reads.
    """
    found = (_product(graph, name) for name in gradients)
    return [product for product in found if product is not None]


def worth_gathering(graph: Graph, gradients: Collection[str], device: str) -> list[WeightProduct]:
    """The products that are worth gathering for some number of processes: two, for the more there are the less it pays.

    A plan that keeps these apart serves any number.
    """
    return [product for product in weight_products(graph, gradients) if product.pays(graph, 2, device)]


def products_apart(
    graph: Graph, gradients: Collection[str], steps: Sequence[Collection[str]] | None, device: str, *, wanted: bool
) -> list[WeightProduct]:
    """The products that have steps of their own.

    Args:
        graph: the graph.
        gradients: names of its results that are gradients.
        steps: names of the nodes of each step of a plan that is replayed, which decides; None: there is no such plan.
        device: `cpu` or `cuda`.
        wanted: whether factors are to be gathered.
    """
    if steps is not None:
        return kept_apart(weight_products(graph, gradients), steps)
    return worth_gathering(graph, gradients, device) if wanted else []


def kept_apart(products: Sequence[WeightProduct], steps: Sequence[Collection[str]]) -> list[WeightProduct]:
    """The products of which each step computes nodes alone, or none.

    Args:
        products: of one graph.
        steps: names of the nodes of each step of a plan.
    """
    return [product for product in products if not any(straddles(nodes, product) for nodes in steps)]


def straddles(nodes: Collection[str], product: WeightProduct) -> bool:
    """Whether some of the nodes belong to the product, and some do not."""
    inside = sum(name in product.nodes for name in nodes)
    return 0 < inside < len(nodes)


def _product(graph: Graph, gradient: str) -> WeightProduct | None:
    names: list[str] = []
    name, transposed = gradient, False
    while True:
        node = graph.producer(name)
        if node is None or not _read_once(graph, name, gradient):
            return None
        names.append(node.name)
        if node.op == "aten.mm.default":
            break
        if node.op != "aten.t.default" and not is_cast(node):
            return None
        transposed ^= node.op == "aten.t.default"
        (name,) = node.refs()
    first, second = node.refs()
    left, turns = _before_transpositions(graph, first, names)
    right, straight_turns = _before_transpositions(graph, second, names)
    if turns % 2 == 0 or straight_turns % 2:  # the rows are not the inner dimension
        return None
    left, right = (right, left) if transposed else (left, right)  # (a b)^T = b^T a^T
    return WeightProduct(gradient, left, right, tuple(node.name for node in graph.nodes if node.name in set(names)))


def _read_once(graph: Graph, name: str, gradient: str) -> bool:
    """Whether a value is read by one node, and is no result; the gradient is a result and read by none."""
    if name == gradient:
        return not graph.users(name) and list(graph.outputs).count(name) == 1
    return len(graph.users(name)) == 1 and name not in graph.outputs


def _before_transpositions(graph: Graph, name: str, names: list[str]) -> tuple[str, int]:
    """The value of which one is a transposition, and how many there are; those that nobody else reads join the names."""
    turns, alone = 0, True
    while (node := _transposition(graph, name)) is not None:
        alone = alone and len(graph.users(name)) == 1 and name not in graph.outputs
        if alone:
            names.append(node.name)
        turns += 1
        (name,) = node.refs()
    return name, turns


def _transposition(graph: Graph, name: str) -> Node | None:
    node = graph.producer(name)
    return node if node is not None and node.op == "aten.t.default" and isinstance(node.args[0], Ref) else None


def _rate(spec: TensorSpec, device: str) -> str:
    return f"{device} half" if device == "cuda" and spec.dtype in ("fp16", "bf16") else device
