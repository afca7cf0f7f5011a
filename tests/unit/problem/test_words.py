"""kind_in_words: messages name problems as PyTorch's users do, not by a class."""

from __future__ import annotations

import itertools

import pytest

from convoy.engines.manifest import engine_ids, load_engine
from convoy.problem import Conv3dProblem, ConvProblem, LinearProblem, Problem, SubgraphProblem, kind_in_words
from convoy.target import Target

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20)
CPU = Target("cpu", "a CPU", "x86_64", 1, 1, 1)

GRAPH = "graph 1\ninput %x: fp32[1,4,8,8]\n%y: fp32[1,4,8,8] = aten.relu.default(%x)\nreturn %y\n"
CASES: dict[str, Problem] = {
    "a convolution": ConvProblem(1, 4, 8, 8, 4, 3, 3),
    "a gradient of a convolution": ConvProblem(1, 4, 8, 8, 4, 3, 3, direction="wgrad"),
    "a three-dimensional convolution": Conv3dProblem(1, 4, (8, 8, 8), 4, (3, 3, 3)),
    "a linear layer": LinearProblem(1, 8, 8),
    "a subgraph": SubgraphProblem(GRAPH, "nchw"),
}


@pytest.mark.parametrize("words", CASES)
def test_a_problem_has_words(words: str) -> None:
    assert kind_in_words(CASES[words]) == words


@pytest.mark.parametrize("words", CASES)
def test_no_engines_refusal_names_a_class(words: str) -> None:
    pairs = itertools.product(engine_ids(), (H100, CPU))
    reasons = [load_engine(engine).supports(CASES[words], target).reason for engine, target in pairs]
    assert [reason for reason in reasons if "Problem" in reason] == []
