"""Reads a bottleneck from a subgraph's text: which convolutions, which constants, which input is the residual."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from convoy.engines.hopper.chains.block_reader import layers_of_block, read_block, size_refusal
from convoy.engines.hopper.chains.bottleneck_tile_config import CHANNELS, Bottleneck
from convoy.problem import ConvProblem, SubgraphProblem
from convoy.regions.block import LAYOUT, block_regions

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
    weights: tuple[int, ...]
    biases: tuple[int, ...]
    x: int
    residual: int


@lru_cache(maxsize=256)
def bottleneck_of(text: str) -> BottleneckProblem | str:
    """The bottleneck that a subgraph's text describes, or the reason why it is none."""
    layers = read_block(text, block_regions, _TAKES)
    if isinstance(layers, str):
        return layers
    first, second, last = layers.problems
    residual = "none" if not layers.added else "x" if layers.added == layers.x else "other"
    words = (first.epilogue.activation, second.epilogue.activation, last.epilogue.activation)
    block = Bottleneck(first.n, first.h, first.w, first.c, first.k, last.k, first.x_dtype, words, residual)
    elements = max(block.c, block.k) * block.n * block.h * block.w
    if refusal := size_refusal((block.c, block.mid, block.k), CHANNELS, elements):
        return refusal
    x, added = (layers.inputs.index(name) for name in (layers.x, layers.added or layers.x))
    return BottleneckProblem(block, layers.weights, layers.biases, x, added)


def layers_of(text: str) -> tuple[ConvProblem, ...]:
    """The three convolutions of a bottleneck's text, each with its epilogue."""
    return layers_of_block(text)


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
