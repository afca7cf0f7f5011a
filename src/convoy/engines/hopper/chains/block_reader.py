"""Reads a block of two or three convolutions from a subgraph's text: their problems, and which constants they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from convoy.engines.subgraph import parse_subgraph
from convoy.errors import InputError
from convoy.graph.ir import Graph
from convoy.problem import ConvProblem
from convoy.regions.conv import conv_region
from convoy.regions.epilogue import chains
from convoy.regions.region import Region

_LAYOUT: Final = "nhwc"


@dataclass(frozen=True, slots=True)
class BlockLayers:
    """The convolutions of a block, in their order.

    Attributes:
        problems: the convolutions, each with its epilogue.
        weights: indices of the weights among the subgraph's constants.
        biases: indices of the biases; -1 where a convolution has none.
        inputs: names of the subgraph's inputs.
        x: name of the input that the first convolution reads.
        added: name of the value that the last one adds; empty where it adds none.
    """

    problems: tuple[ConvProblem, ...]
    weights: tuple[int, ...]
    biases: tuple[int, ...]
    inputs: tuple[str, ...]
    x: str
    added: str


def read_block(text: str, pattern: Callable[[Graph, Sequence[str]], list[Region]], takes: str) -> BlockLayers | str:
    """The convolutions of a subgraph that is one whole block, or the reason why it is none.

    Args:
        text: of the subgraph.
        pattern: proposes such blocks of a graph.
        takes: what the engine computes, for the reason.
    """
    try:
        graph = parse_subgraph(text)
        found = pattern(graph, (_LAYOUT,))
    except InputError as error:
        return str(error)
    if len(found) != 1 or len(found[0].nodes) != len(graph.nodes) or found[0].results != graph.outputs:
        return f"{takes}, got another subgraph"
    return _read(graph)


def size_refusal(channels: Sequence[int], multiple: int, elements: int) -> str:
    """Why a kernel cannot compute tensors of such sizes; empty if it can.

    Args:
        channels: of x, between the convolutions, and of y where they are others.
        multiple: that channels have to be of.
        elements: of the largest tensor.
    """
    if any(count % multiple for count in channels):
        *first, last = map(str, channels)
        return f"needs channels in multiples of {multiple}, got {', '.join(first)} and {last}"
    return "" if 0 < elements < 1 << 31 else "needs tensors of 1 to 2^31 - 1 elements"


def layers_of_block(text: str) -> tuple[ConvProblem, ...]:
    """The convolutions of a block's text, each with its epilogue."""
    return tuple(map(_convolution, _regions(parse_subgraph(text))))


def _read(graph: Graph) -> BlockLayers:
    regions = _regions(graph)
    names = [constant.name for constant in graph.constants()]
    weights = [names.index(region.constants[0]) for region in regions]
    biases = [names.index(region.constants[1]) if len(region.constants) > 1 else -1 for region in regions]
    last = regions[-1].args
    return BlockLayers(
        tuple(map(_convolution, regions)), tuple(weights), tuple(biases), tuple(graph.inputs), regions[0].args[0],
        last[1] if len(last) > 1 else "",
    )  # fmt: skip


def _regions(graph: Graph) -> list[Region]:
    layers = [node for node in graph.nodes if node.op == "conv2d"]
    return [conv_region(graph, chains(graph, node)[-1], (_LAYOUT,), "half") for node in layers]


def _convolution(region: Region) -> ConvProblem:
    (problem,) = region.problems
    assert isinstance(problem, ConvProblem)
    return problem
