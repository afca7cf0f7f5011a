"""Counts the zeros in the inputs of a net's convolutions, by running the graph once on the user's inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.nn.functional import max_pool2d

from convoy.engines.activation_sparsity import BLOCK, TILE, SparsityShares
from convoy.engines.interpret import compile_graph
from convoy.engines.torch_flags import convolutions
from convoy.graph.ir import Arg, Graph, Node, Ref, Symbol, Value
from convoy.graph.rebuild import rebuild
from convoy.problem import TensorSpec
from convoy.typed_torch import split


def convolution_inputs(graph: Graph) -> dict[str, str]:
    """The value that each `conv2d` node reads, by the node's name, in graph order."""
    return {node.name: next(iter(node.refs())) for node in graph.nodes if node.op == "conv2d"}


@torch.no_grad()
def zero_shares(
    graph: Graph, constants: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> dict[str, SparsityShares]:
    """The share of zeros, and of zero channels, tiles and blocks, in every value that a convolution reads, averaged over images.

    Counting is added to the graph as operators, so no more values are alive at once than in a normal run. -0.0 counts as
    zero.

    Args:
        graph: an inference graph.
        constants: its constants by name.
        inputs: the user's inputs; random inputs give other shares.
    """
    names = [name for name in dict.fromkeys(convolution_inputs(graph).values()) if graph.values[name].spec.elements]
    values = dict(graph.values)
    behind: dict[str, list[Node]] = {}  # by the name of the node that makes a value; empty for inputs and constants
    counts: list[str] = []
    for name in names:
        added, counted = _counting(values[name])
        made = graph.producer(name)
        behind["" if made is None else made.name] = [
            *(node for node, _ in added),
            *behind.get("" if made is None else made.name, ()),
        ]
        values.update((value.name, value) for _, value in added)
        counts += counted
    nodes = behind.get("", [])
    for node in graph.nodes:
        nodes += (node, *behind.get(node.name, ()))
    probe = rebuild(graph.inputs, tuple(counts), values, nodes)
    held = [constants[value.name] for value in probe.constants()]
    with convolutions("as_torch", inputs[0].device):  # PyTorch caches the cuDNN plans of these first calls
        found = iter(compile_graph(probe)(inputs, held))
    return {
        name: SparsityShares(*(1 - int(next(found)) / whole for whole in _totals(graph.values[name].spec.shape)))
        for name in names
    }


def _totals(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """The number of values, channels, tiles and blocks of a value of shape [n, c, h, w]."""
    n, c, h, w = shape
    tiles = -(-h // TILE) * -(-w // TILE)
    return math.prod(shape), n * c, n * c * tiles, n * -(-c // BLOCK) * tiles


def _counting(value: Value) -> tuple[list[tuple[Node, Value]], list[str]]:
    """Operators that count a value's nonzero values, channels, tiles and blocks, and the names of the counts.

    They use maxima of magnitudes, which pass NaN on: NaN counts as nonzero.
    """
    n, c, h, w = value.spec.shape
    rows, columns, dtype = -(-h // TILE), -(-w // TILE), value.spec.dtype
    added: list[tuple[Node, Value]] = []
    one = (1, 1)

    def add(what: str, op: str, of: str, shape: tuple[int, ...], dtype: str, /, *args: Arg, **named: Arg) -> str:
        name = f"{what}.{value.name}"
        node = Node(name, op, (Ref(of), *args), tuple(named.items()), (name,))
        added.append((node, Value(name, TensorSpec(shape, dtype), "node")))
        return name

    size = (TILE, TILE)
    height = (BLOCK, *one)
    magnitude = add("magnitude", "aten.abs.default", value.name, (n, c, h, w), dtype)
    pooled = "aten.max_pool2d.default"
    tiles = add("tiles", pooled, magnitude, (n, c, rows, columns), dtype, size, size, (0, 0), one, True)
    channels = add("channels", "aten.amax.default", tiles, (n, c), dtype, (2, 3))
    # A 3-D pooling takes images as channels and channels as depth; it supports no channels_last of that kind.
    dense = Symbol("memory_format.nchw")
    plain = add("plain", "aten.clone.default", tiles, (n, c, rows, columns), dtype, memory_format=dense)
    pooled = "aten.max_pool3d.default"
    blocks = add(
        "blocks", pooled, plain, (n, -(-c // BLOCK), rows, columns), dtype,
        height, height, (0, 0, 0), (1, 1, 1), True,
    )  # fmt: skip
    # By planes, exact in fp32: over all values, PyTorch's count_nonzero would hold eight bytes for each.
    wide = "fp64" if dtype == "fp64" else "fp32"
    norm, wanted = "aten.linalg_vector_norm.default", Symbol(f"dtype.{wide}")
    planes = add("planes", norm, value.name, (n, c), wide, 0, (2, 3), False, dtype=wanted)
    values = add("live.values", "aten.sum.default", planes, (), "i64", dtype=Symbol("dtype.i64"))
    counted = [
        add(f"live.{what}", "aten.count_nonzero.default", of, (), "i64")
        for what, of in (("channels", channels), ("tiles", tiles), ("blocks", blocks))
    ]
    return added, [values, *counted]


def image_shares(x: torch.Tensor) -> SparsityShares:
    """Shares of zeros in one image, [c, h, w]; tiles at the right and lower edge, and the last block, may be smaller."""
    live = (x != 0).unsqueeze(0)
    tiles = max_pool2d(live.float(), TILE, TILE, ceil_mode=True)[0]
    blocks = [part.amax(0) for part in split(tiles, BLOCK)]
    shares = (live, live.flatten(2).any(2), tiles, torch.stack(blocks))
    return SparsityShares(*(1 - float(found.double().mean()) for found in shares))


@torch.no_grad()
def layer_zeros(
    graph: Graph, constants: Mapping[str, torch.Tensor], images: Iterable[Sequence[torch.Tensor]]
) -> dict[str, list[SparsityShares]]:
    """For each convolution, by its node's name, the shares of zeros in every image of its input.

    Args:
        graph: an inference graph.
        constants: its constants by name.
        images: inputs of the graph, call by call; each image of a batch counts.
    """
    read = convolution_inputs(graph)
    names = [name for name in dict.fromkeys(read.values()) if graph.values[name].spec.elements]
    probe = rebuild(graph.inputs, tuple(names), graph.values, list(graph.nodes))
    function = compile_graph(probe)
    held = [constants[value.name] for value in probe.constants()]
    found: dict[str, list[SparsityShares]] = {name: [] for name in names}
    for inputs in images:
        for name, x in zip(names, function(inputs, held), strict=True):
            found[name] += map(image_shares, x)
    return {layer: found[name] for layer, name in read.items() if name in found}
