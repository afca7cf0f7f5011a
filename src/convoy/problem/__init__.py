"""What is to be computed: problems as plain data with one canonical key each. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from convoy.errors import InputError
from convoy.problem.config import EngineConfig, Knob, Knobs
from convoy.problem.conv import ACTIVATIONS, DIRECTIONS, ConvProblem, Epilogue
from convoy.problem.mask import WeightMask
from convoy.problem.other import LayoutProblem, LinearProblem, SubgraphProblem
from convoy.problem.pool import Pool
from convoy.problem.spec import ANY_LAYOUT, DTYPE_BYTES, LAYOUTS, TensorSpec

Problem = ConvProblem | LinearProblem | SubgraphProblem | LayoutProblem
"""Anything that an engine may be asked to compute."""

__all__ = [
    "ACTIVATIONS",
    "ANY_LAYOUT",
    "DIRECTIONS",
    "DTYPE_BYTES",
    "LAYOUTS",
    "ConvProblem",
    "EngineConfig",
    "Epilogue",
    "Knob",
    "Knobs",
    "LayoutProblem",
    "LinearProblem",
    "Pool",
    "Problem",
    "SubgraphProblem",
    "TensorSpec",
    "WeightMask",
    "is_subgraph_key",
    "parse_problem",
    "subgraph_texts",
]


def subgraph_texts(problems: Iterable[Problem]) -> dict[str, str]:
    """The texts of those problems that cannot be read from their key alone, by key: pieces of a graph."""
    return {problem.key: problem.text for problem in problems if isinstance(problem, SubgraphProblem)}


def is_subgraph_key(key: str) -> bool:
    """Whether a key is a piece of a graph's, which says nothing without its text."""
    return key.startswith("subgraph:")


def parse_problem(key: str, text: str = "") -> Problem:
    """Read a problem back from its key; raises InputError on anything else.

    A subgraph needs its `text` too. A convolution on pruned weights gets its mask from the mask's text, and without it is known
    by the mask's digest alone.
    """
    kind = key.partition(":")[0]
    if kind == "conv":
        problem = ConvProblem.parse(key)
        return replace(problem, mask=WeightMask.parse(text)) if text else problem
    if kind == "linear":
        return LinearProblem.parse(key)
    if kind == "layout":
        return LayoutProblem.parse(key)
    if kind == "subgraph" and text:
        problem = SubgraphProblem(text, key.split(":")[1])
        if problem.key == key:
            return problem
    raise InputError("problem", key, "the key of a conv, linear, layout or (with its text) subgraph problem")
