"""Problems: what is to be computed, as plain data with one canonical key each. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from convoy.errors import InputError
from convoy.problem.config import EngineConfig, Knob, Knobs
from convoy.problem.conv import ACTIVATIONS, DIRECTIONS, ConvProblem, Epilogue
from convoy.problem.conv3d import Conv3dProblem
from convoy.problem.mask import WeightMask
from convoy.problem.other import LayoutProblem, LinearProblem, SubgraphProblem
from convoy.problem.pool import Pool
from convoy.problem.spec import (
    ANY_LAYOUT,
    DTYPE_BYTES,
    LAYOUTS,
    VOLUME_LAYOUTS,
    TensorSpec,
    image_layout,
    layout_beside,
    volume_layout,
)

Problem = ConvProblem | Conv3dProblem | LinearProblem | SubgraphProblem | LayoutProblem
"""Any problem that an engine may be asked to compute."""

ConvolutionProblem = ConvProblem | Conv3dProblem
"""A convolution of images or of volumes, in any direction."""

LayerProblem = ConvolutionProblem | LinearProblem
"""A sum of products with an epilogue."""

__all__ = [
    "ACTIVATIONS",
    "ANY_LAYOUT",
    "DIRECTIONS",
    "DTYPE_BYTES",
    "LAYOUTS",
    "VOLUME_LAYOUTS",
    "Conv3dProblem",
    "ConvProblem",
    "ConvolutionProblem",
    "EngineConfig",
    "Epilogue",
    "Knob",
    "Knobs",
    "LayerProblem",
    "LayoutProblem",
    "LinearProblem",
    "Pool",
    "Problem",
    "SubgraphProblem",
    "TensorSpec",
    "WeightMask",
    "image_layout",
    "is_subgraph_key",
    "kind_in_words",
    "layout_beside",
    "parse_problem",
    "subgraph_texts",
    "volume_layout",
]


def subgraph_texts(problems: Iterable[Problem]) -> dict[str, str]:
    """The texts of subgraph problems, by key: their key does not describe them."""
    return {problem.key: problem.text for problem in problems if isinstance(problem, SubgraphProblem)}


def is_subgraph_key(key: str) -> bool:
    """Whether a key is a subgraph's, which says nothing without the subgraph's text."""
    return key.startswith("subgraph:")


def kind_in_words(problem: Problem) -> str:
    """A problem's kind for messages, such as "a convolution"."""
    if isinstance(problem, ConvProblem | Conv3dProblem):
        volume = "three-dimensional " if isinstance(problem, Conv3dProblem) else ""
        return f"a {volume}convolution" if problem.direction == "fprop" else f"a gradient of a {volume}convolution"
    if isinstance(problem, LinearProblem):
        return "a linear layer"
    return "a copy between memory formats" if isinstance(problem, LayoutProblem) else "a subgraph"


def parse_problem(key: str, text: str = "") -> Problem:
    """Read a problem from its key; raises InputError on anything else.

    A subgraph also needs its `text`. A convolution with pruned weights gets its mask from the mask's text; without it, only
    the mask's digest is known.
    """
    kind = key.partition(":")[0]
    if kind == "conv":
        problem = ConvProblem.parse(key)
        return replace(problem, mask=WeightMask.parse(text)) if text else problem
    if kind == "conv3d":
        return Conv3dProblem.parse(key)
    if kind == "linear":
        return LinearProblem.parse(key)
    if kind == "layout":
        return LayoutProblem.parse(key)
    if kind == "subgraph" and text:
        problem = SubgraphProblem(text, key.split(":")[1])
        if problem.key == key:
            return problem
    raise InputError("problem", key, "the key of a conv, conv3d, linear, layout or (with its text) subgraph problem")
