"""How many zeros a net's convolutions are given: counted on the user's own inputs, by running the graph once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import max_pool2d

from convoy.engines.interpret import compile_graph
from convoy.graph.ir import Graph, Node, Ref, Value
from convoy.graph.rebuild import rebuild
from convoy.problem import TensorSpec

TILE: Final = 8
"""Pixels along the sides of a tile: 64 of them are the least that a tensor core's instruction takes with all its filters."""

BLOCK: Final = 32
"""Channels of a block: what such an instruction sums over in fp32 or, twice, in half types."""


def convolution_inputs(graph: Graph) -> dict[str, str]:
    """The value that each `conv2d` node reads, by the node's name, in graph order."""
    return {node.name: next(iter(node.refs())) for node in graph.nodes if node.op == "conv2d"}


@torch.no_grad()
def zero_shares(
    graph: Graph, constants: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> dict[str, float]:
    """The share of exact zeros (-0.0 is one) in every value that a convolution reads, 0..1, by the value's name.

    Counting joins the graph as operators, so that no more values are held at once than in an ordinary run.

    Args:
        graph: an inference graph.
        constants: its constants by name.
        inputs: the user's own inputs; what random ones give is not what real ones do.
    """
    names = [name for name in dict.fromkeys(convolution_inputs(graph).values()) if graph.values[name].spec.elements]
    counts = {name: f"nonzero.{index}.{name}" for index, name in enumerate(names)}
    values = dict(graph.values)
    nodes = list(graph.nodes)
    for name, count in counts.items():
        values[count] = Value(count, TensorSpec((), "i64"), "node")
        made = graph.producer(name)
        at = 0 if made is None else nodes.index(made) + 1
        nodes.insert(at, Node(count, "aten.count_nonzero.default", (Ref(name),), (), (count,)))
    probe = rebuild(graph.inputs, tuple(counts.values()), values, nodes)
    found = compile_graph(probe)(inputs, [constants[value.name] for value in probe.constants()])
    return {name: 1 - int(count) / graph.values[name].spec.elements for name, count in zip(names, found, strict=True)}


@dataclass(frozen=True, slots=True)
class ImageZeros:
    """What one image's convolution input could spare, each a share in 0..1.

    Attributes:
        zeros: values that are zero.
        dead_channels: channels that are zero in the whole image.
        dead_tiles: of all tiles of 8x8 pixels of one channel, those that are zero.
        dead_blocks: of all blocks of 8x8 pixels and 32 channels, those that are zero.
    """

    zeros: float
    dead_channels: float
    dead_tiles: float
    dead_blocks: float

    @staticmethod
    def of(x: torch.Tensor) -> ImageZeros:
        """Count in an image, [c, h, w]; tiles at the right and lower edge, and the last block, may be smaller."""
        live = (x != 0).unsqueeze(0)
        tiles = max_pool2d(live.float(), TILE, TILE, ceil_mode=True)[0]
        blocks = [part.amax(0) for part in tiles.split(BLOCK)]
        shares = (live, live.flatten(2).any(2), tiles, torch.stack(blocks))
        return ImageZeros(*(1 - float(found.double().mean()) for found in shares))


@torch.no_grad()
def layer_zeros(
    graph: Graph, constants: Mapping[str, torch.Tensor], images: Iterable[Sequence[torch.Tensor]]
) -> dict[str, list[ImageZeros]]:
    """For each convolution, by its node's name, what every image's input could spare.

    Args:
        graph: an inference graph.
        constants: its constants by name.
        images: inputs of the graph, call by call; the images of a batch count one by one.
    """
    read = convolution_inputs(graph)
    names = [name for name in dict.fromkeys(read.values()) if graph.values[name].spec.elements]
    probe = rebuild(graph.inputs, tuple(names), graph.values, list(graph.nodes))
    function = compile_graph(probe)
    held = [constants[value.name] for value in probe.constants()]
    found: dict[str, list[ImageZeros]] = {name: [] for name in names}
    for inputs in images:
        for name, x in zip(names, function(inputs, held), strict=True):
            found[name] += map(ImageZeros.of, x)
    return {layer: found[name] for layer, name in read.items() if name in found}
