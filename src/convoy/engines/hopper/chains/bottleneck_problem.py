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
    layers = [node for node in graph.nodes if node.op == "conv2d"]
    regions = [conv_region(graph, chains(graph, node)[-1], (LAYOUT,), "half") for node in layers]
    first, second, last = (problem for region in regions for problem in region.problems)
    assert isinstance(first, ConvProblem)
    assert isinstance(second, ConvProblem)
    assert isinstance(last, ConvProblem)
    names = [constant.name for constant in graph.constants()]
    weights = tuple(names.index(region.constants[0]) for region in regions)
    biases = tuple(names.index(region.constants[1]) if len(region.constants) > 1 else -1 for region in regions)
    x, added = regions[0].args[0], regions[-1].args[1:]
    residual = "none" if not added else "x" if added[0] == x else "other"
    words = (first.epilogue.activation, second.epilogue.activation, last.epilogue.activation)
    block = Bottleneck(first.n, first.h, first.w, first.c, first.k, last.k, first.x_dtype, words, residual)
    inputs = list(graph.inputs)
    assert len(weights) == len(biases) == 3
    return BottleneckProblem(
        block, (weights[0], weights[1], weights[2]), (biases[0], biases[1], biases[2]), inputs.index(x),
        inputs.index(added[0] if added else x),
    )  # fmt: skip


def sample() -> SubgraphProblem:
    """ResNet-50's second block at batch 1."""
    side, wide, inner = "[1,{},56,56]", 256, 64
    big, small = side.format(wide), side.format(inner)
    text = (
        f"graph 1\ninput %x: fp16{big}\nconstant %w0: fp16[{inner},{wide},1,1]\nconstant %b0: fp16[{inner}]\n"
        f"constant %w1: fp16[{inner},{inner},3,3]\nconstant %b1: fp16[{inner}]\n"
        f"constant %w2: fp16[{wide},{inner},1,1]\nconstant %b2: fp16[{wide}]\n"
        f"%y0: fp16{small} = conv2d(%x, %w0, %b0, (1, 1), (0, 0), (1, 1), 1)\n"
        f"%a0: fp16{small} = aten.relu.default(%y0)\n"
        f"%y1: fp16{small} = conv2d(%a0, %w1, %b1, (1, 1), (1, 1), (1, 1), 1)\n"
        f"%a1: fp16{small} = aten.relu.default(%y1)\n"
        f"%y2: fp16{big} = conv2d(%a1, %w2, %b2, (1, 1), (0, 0), (1, 1), 1)\n"
        f"%s: fp16{big} = aten.add.Tensor(%y2, %x)\n%a2: fp16{big} = aten.relu.default(%s)\nreturn %a2\n"
    )
    return SubgraphProblem(text, LAYOUT, label="bottleneck")
