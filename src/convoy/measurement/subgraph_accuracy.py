"""What the accuracy check of subgraphs needs: their narrowest dtype, whether they draw random numbers, PyTorch's own results."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

from convoy.engines.interpret import compile_graph
from convoy.graph.randomness import draws_random
from convoy.graph.text import parse_graph
from convoy.measurement.data import Data
from convoy.problem import SubgraphProblem

MAX_FLIPPED: Final = {"fp64": 0.0, "fp32": 1e-4, "fp16": 2e-3, "bf16": 2e-2}
"""Share of a subgraph's integers and flags that may differ from float64's: rounding of compared values makes ties, or
reverses near ties. After a batch norm and ReLU, 0.13 % of a 3x3 maximum pooling's positions differ in bf16, 0.02 % in
fp16, none in fp32."""

STOCK_ERROR_FACTOR: Final = 4.0
"""A subgraph's error may be this many times that of PyTorch's own operators: sums in another order differ by less than two."""


@lru_cache(maxsize=1024)
def narrowest(problem: SubgraphProblem) -> str:
    """The narrowest floating dtype in a subgraph."""
    found = {value.spec.dtype for value in parse_graph(problem.text).values.values()}
    return next((d for d in ("bf16", "fp16", "fp32", "fp64") if d in found), "fp32")


@lru_cache(maxsize=1024)
def is_random(problem: SubgraphProblem) -> bool:
    """Whether a subgraph draws random numbers."""
    return any(map(draws_random, parse_graph(problem.text).nodes))


def stock_results(problem: SubgraphProblem, data: Data) -> list[torch.Tensor]:
    """A subgraph's results by PyTorch's own operators, in their own dtypes."""
    with torch.no_grad():
        return list(compile_graph(parse_graph(problem.text))(data.args, data.constants))
