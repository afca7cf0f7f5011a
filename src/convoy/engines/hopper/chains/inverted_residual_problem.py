"""Reads an inverted residual block from a subgraph's text: which convolutions, which constants, whether x is added."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from convoy.engines.hopper.chains.block_reader import layers_of_block, read_block, size_refusal
from convoy.engines.hopper.chains.inverted_residual_tile_config import CHANNELS, InvertedResidual
from convoy.problem import ConvProblem, SubgraphProblem
from convoy.regions.inverted import LAYOUT, inverted_regions

_TAKES: Final = "computes 1x1, depthwise 3x3 or 5x5, and 1x1 convolutions in a row, fp16 or bf16 with constant weights"


@dataclass(frozen=True, slots=True)
class InvertedResidualProblem:
    """A subgraph that is an inverted residual block.

    Attributes:
        block: its sizes.
        weights: indices of the three weights among the subgraph's constants.
        biases: indices of the biases; -1 where a convolution has none.
    """

    block: InvertedResidual
    weights: tuple[int, int, int]
    biases: tuple[int, int, int]


@lru_cache(maxsize=256)
def inverted_residual_of(text: str) -> InvertedResidualProblem | str:
    """The inverted residual block that a subgraph's text describes, or the reason why it is none."""
    layers = read_block(text, inverted_regions, _TAKES)
    if isinstance(layers, str):
        return layers
    first, second, last = layers.problems
    block = InvertedResidual(
        first.n, first.h, first.w, first.c, first.k, last.k, second.r, second.stride_h, first.x_dtype,
        (first.epilogue.activation, second.epilogue.activation), last.epilogue.residual,
    )  # fmt: skip
    elements = max(block.c * block.h * block.w, block.k * block.p * block.q) * block.n
    refusal = size_refusal((block.c, block.mid, block.k), CHANNELS, elements)
    return refusal or InvertedResidualProblem(block, layers.weights, layers.biases)


def layers_of_inverted(text: str) -> tuple[ConvProblem, ...]:
    """The three convolutions of an inverted residual block's text, each with its epilogue."""
    return layers_of_block(text)


def inverted_subgraph(block: InvertedResidual, *, biased: bool = True) -> SubgraphProblem:
    """The subgraph that an inverted residual block computes; inverse of `inverted_residual_of`, with biases or without."""
    dtype, before, after = block.dtype, f"{block.h},{block.w}]", f"{block.p},{block.q}]"
    lines = ["graph 1", f"input %v0: {dtype}[{block.n},{block.c},{before}"]
    shapes = ((block.mid, block.c, 1), (block.mid, 1, block.taps), (block.k, block.mid, 1))
    for i, (filters, summed, taps) in enumerate(shapes):
        lines.append(f"constant %w{i}: {dtype}[{filters},{summed},{taps},{taps}]")
        lines += [f"constant %b{i}: {dtype}[{filters}]"] if biased else []
    value, words = "%v0", (*block.activations, "none")
    for i, (filters, _, taps) in enumerate(shapes):
        image, pad = f"{dtype}[{block.n},{filters},{after if i else before}", taps // 2
        stride, groups, bias = block.stride if i == 1 else 1, block.mid if i == 1 else 1, f"%b{i}" if biased else "None"
        places = f"({stride}, {stride}), ({pad}, {pad}), (1, 1), {groups}"
        lines.append(f"%y{i}: {image} = conv2d({value}, %w{i}, {bias}, {places})")
        value = f"%y{i}"
        if words[i] != "none":
            lines.append(f"%a{i}: {image} = aten.{words[i]}.default({value})")
            value = f"%a{i}"
    if block.residual:
        lines.append(f"%s: {dtype}[{block.n},{block.k},{after} = aten.add.Tensor({value}, %v0)")
        value = "%s"
    text = "\n".join([*lines, f"return {value}"]) + "\n"
    return SubgraphProblem(text, LAYOUT, bytes_min=block.bytes_min, label="inverted residual")


def inverted_sample() -> SubgraphProblem:
    """MobileNetV2's third block at batch 1."""
    return inverted_subgraph(InvertedResidual(1, 56, 56, 24, 144, 24, 3, 1, "fp16", ("relu6", "relu6"), True))
