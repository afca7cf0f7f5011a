"""Reads a bottleneck from a subgraph's text: which convolutions, which constants, which input is the residual."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from convoy.engines.hopper.chains.bottleneck_tile_config import CHANNELS, Bottleneck
from convoy.engines.subgraph import parse_subgraph
from convoy.errors import InputError
from convoy.graph.ir import Graph
from convoy.problem import ConvProblem, SubgraphProblem
from convoy.regions.block import LAYOUT, block_regions
from convoy.regions.conv import conv_region
from convoy.regions.epilogue import chains
from convoy.regions.region import Region

_TAKES: Final = (
    "computes 1x1, 3x3 and 1x1 convolutions of stride 1 that follow each other, fp16 or bf16 with constant weights"
)


@dataclass(frozen=True, slots=True)
class BottleneckProblem:
    """A subgraph that is a bottleneck.

    Attributes:
        block: its sizes.
        weights: indices of the three weights among the subgraph's constants.
        biases: indices of the biases; -1 where a convolution has none.
        x: index of x among the subgraph's inputs.
        residual: index of the residual; that of x if there is none.
    """

    block: Bottleneck
    weights: tuple[int, int, int]
    biases: tuple[int, int, int]
    x: int
    residual: int


@lru_cache(maxsize=256)
def bottleneck_of(text: str) -> BottleneckProblem | str:
    """The bottleneck that a subgraph's text describes, or the reason why it is none."""
    try:
        graph = parse_subgraph(text)
        regions = block_regions(graph, (LAYOUT,))
    except InputError as error:
        return str(error)
    if len(regions) != 1 or len(regions[0].nodes) != len(graph.nodes) or regions[0].results != graph.outputs:
        return f"{_TAKES}, got another subgraph"
    found = _read(graph)
    block = found.block
    if block.c % CHANNELS or block.mid % CHANNELS or block.k % CHANNELS:
        return f"needs channels in multiples of {CHANNELS}, got {block.c}, {block.mid} and {block.k}"
    if not block.n or max(block.c, block.k) * block.n * block.h * block.w >= 1 << 31:
        return "needs tensors of 1 to 2^31 - 1 elements"
    return found


def _read(graph: Graph) -> BottleneckProblem:
    regions = _regions(graph)
    first, second, last = (problem for region in regions for problem in region.problems)
    assert isinstance(first, ConvProblem)
    assert isinstance(second, ConvProblem)
    assert isinstance(last, ConvProblem)
    names = [constant.name for constant in graph.constants()]
    weights = [names.index(region.constants[0]) for region in regions]
    biases = [names.index(region.constants[1]) if len(region.constants) > 1 else -1 for region in regions]
    x, added = regions[0].args[0], regions[-1].args[1:]
    residual = "none" if not added else "x" if added[0] == x else "other"
    words = (first.epilogue.activation, second.epilogue.activation, last.epilogue.activation)
    block = Bottleneck(first.n, first.h, first.w, first.c, first.k, last.k, first.x_dtype, words, residual)
    inputs = list(graph.inputs)
    return BottleneckProblem(
        block, (weights[0], weights[1], weights[2]), (biases[0], biases[1], biases[2]), inputs.index(x),
        inputs.index(added[0] if added else x),
    )  # fmt: skip


def _regions(graph: Graph) -> list[Region]:
    layers = [node for node in graph.nodes if node.op == "conv2d"]
    return [conv_region(graph, chains(graph, node)[-1], (LAYOUT,), "half") for node in layers]


def layers_of(text: str) -> tuple[ConvProblem, ...]:
    """The three convolutions of a bottleneck's text, each with its epilogue."""
    return tuple(
        problem
        for region in _regions(parse_subgraph(text))
        for problem in region.problems
        if isinstance(problem, ConvProblem)
    )


def subgraph_of(block: Bottleneck, *, biased: bool = True) -> SubgraphProblem:
    """The subgraph that a bottleneck computes; inverse of `bottleneck_of`, with biases or without."""
    side, dtype = f"{block.h},{block.w}]", block.dtype
    lines = ["graph 1", f"input %v0: {dtype}[{block.n},{block.c},{side}"]
    lines += [f"input %v1: {dtype}[{block.n},{block.k},{side}"] if block.residual == "other" else []
    shapes = ((block.mid, block.c, 1), (block.mid, block.mid, 3), (block.k, block.mid, 1))
    for i, (filters, summed, taps) in enumerate(shapes):
        lines.append(f"constant %w{i}: {dtype}[{filters},{summed},{taps},{taps}]")
        lines += [f"constant %b{i}: {dtype}[{filters}]"] if biased else []
    value = "%v0"
    for i, (filters, _, taps) in enumerate(shapes):
        image, pad, bias = f"{dtype}[{block.n},{filters},{side}", taps // 2, f"%b{i}" if biased else "None"
        lines.append(f"%y{i}: {image} = conv2d({value}, %w{i}, {bias}, (1, 1), ({pad}, {pad}), (1, 1), 1)")
        value = f"%y{i}"
        if i == 2 and block.residual != "none":
            lines.append(f"%s: {image} = aten.add.Tensor({value}, {'%v0' if block.residual == 'x' else '%v1'})")
            value = "%s"
        if block.activations[i] != "none":
            lines.append(f"%a{i}: {image} = aten.{block.activations[i]}.default({value})")
            value = f"%a{i}"
    weights = sum(filters * summed * taps * taps for filters, summed, taps in shapes)
    assert weights * 2 == block.weight_bytes
    text = "\n".join([*lines, f"return {value}"]) + "\n"
    return SubgraphProblem(text, LAYOUT, bytes_min=block.bytes_min, label="bottleneck")


def sample() -> SubgraphProblem:
    """ResNet-50's second block at batch 1."""
    return subgraph_of(Bottleneck(1, 56, 56, 256, 64, 256, "fp16", ("relu", "relu", "relu"), "x"))
