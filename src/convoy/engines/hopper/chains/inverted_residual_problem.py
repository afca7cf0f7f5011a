"""Reads an inverted residual block, or one without its last layer, from a subgraph's text: which convolutions and constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from convoy.engines.hopper.chains.block_reader import BlockLayers, layers_of_block, read_block, size_refusal
from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_tile_config import CHANNELS
from convoy.problem import ConvProblem, SubgraphProblem
from convoy.regions.expanded import expanded_regions
from convoy.regions.inverted import LAYOUT, inverted_regions

_TAKES: Final = "computes 1x1, depthwise 3x3 or 5x5, and 1x1 convolutions in a row, fp16 or bf16 with constant weights"
_EXPANDED: Final = "computes a 1x1 and a depthwise 3x3 or 5x5 convolution in a row, fp16 or bf16 with constant weights"


@dataclass(frozen=True, slots=True)
class InvertedResidualProblem:
    """A subgraph that is an inverted residual block, or one without its last layer.

    Attributes:
        block: its sizes.
        weights: indices of the weights among the subgraph's constants.
        biases: indices of the biases; -1 where a convolution has none.
    """

    block: InvertedResidual
    weights: tuple[int, ...]
    biases: tuple[int, ...]


@lru_cache(maxsize=256)
def inverted_residual_of(text: str) -> InvertedResidualProblem | str:
    """The inverted residual block that a subgraph's text describes, or the reason why it is none."""
    layers = read_block(text, inverted_regions, _TAKES)
    if isinstance(layers, str):
        return layers
    return _problem(layers)


@lru_cache(maxsize=256)
def expand_depthwise_of(text: str) -> InvertedResidualProblem | str:
    """The block without its last layer that a subgraph's text describes, or the reason why it is none."""
    layers = read_block(text, expanded_regions, _EXPANDED)
    return layers if isinstance(layers, str) else _problem(layers)


def _problem(layers: BlockLayers) -> InvertedResidualProblem | str:
    first, second, *rest = layers.problems
    last = rest[0] if rest else second
    block = InvertedResidual(
        first.n, first.h, first.w, first.c, first.k, last.k, second.r, second.stride_h, first.x_dtype,
        (first.epilogue.activation, second.epilogue.activation), last.epilogue.residual, bool(rest),
    )  # fmt: skip
    elements = max(block.c * block.h * block.w, block.k * block.p * block.q) * block.n
    channels = (block.c, block.mid, block.k) if rest else (block.c, block.mid)
    return size_refusal(channels, CHANNELS, elements) or InvertedResidualProblem(block, layers.weights, layers.biases)


def layers_of_inverted(text: str) -> tuple[ConvProblem, ...]:
    """The convolutions of a block's text, each with its epilogue."""
    return layers_of_block(text)


def inverted_subgraph(block: InvertedResidual, *, biased: bool = True) -> SubgraphProblem:
    """The subgraph that a block computes; inverse of `inverted_residual_of` or `expand_depthwise_of`, with biases or without."""
    dtype, before, after = block.dtype, f"{block.h},{block.w}]", f"{block.p},{block.q}]"
    lines = ["graph 1", f"input %v0: {dtype}[{block.n},{block.c},{before}"]
    shapes = [(block.mid, block.c, 1), (block.mid, 1, block.taps)]
    shapes += [(block.k, block.mid, 1)] if block.projects else []
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
    label = "inverted residual" if block.projects else "expand + depthwise"
    return SubgraphProblem(text, LAYOUT, bytes_min=block.bytes_min, label=label)


def inverted_sample() -> SubgraphProblem:
    """MobileNetV2's third block at batch 1."""
    return inverted_subgraph(InvertedResidual(1, 56, 56, 24, 144, 24, 3, 1, "fp16", ("relu6", "relu6"), True))


def expand_depthwise_sample() -> SubgraphProblem:
    """EfficientNet-B0's third block up to its gate, at batch 1."""
    block = InvertedResidual(1, 56, 56, 24, 144, 144, 3, 1, "fp16", ("silu", "silu"), residual=False, projects=False)
    return inverted_subgraph(block)
