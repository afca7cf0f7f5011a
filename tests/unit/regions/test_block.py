"""The three convolutions of a bottleneck as one region."""

from __future__ import annotations

import pytest

from convoy.graph.text import parse_graph
from convoy.problem import SubgraphProblem
from convoy.regions import propose
from convoy.regions.region import Region

NET = """graph 1
input %x: fp16[2,64,6,6]
input %z: fp16[2,64,6,6]
constant %w0: fp16[64,64,1,1]
constant %w1: fp16[64,64,3,3]
constant %w2: fp16[64,64,1,1]
%a: fp16[2,64,6,6] = conv2d(%x, %w0, None, (1, 1), (0, 0), (1, 1), 1)
%p: fp16[2,64,6,6] = aten.relu.default(%a)
%b: fp16[2,64,6,6] = conv2d(%p, %w1, None, (1, 1), (1, 1), (1, 1), 1)
%q: fp16[2,64,6,6] = aten.relu.default(%b)
%c: fp16[2,64,6,6] = conv2d(%q, %w2, None, (1, 1), (0, 0), (1, 1), 1)
%d: fp16[2,64,6,6] = aten.add.Tensor(%c, %x)
%y: fp16[2,64,6,6] = aten.relu.default(%d)
return %y
"""


def blocks(text: str, patterns: tuple[str, ...] = ("block",)) -> list[Region]:
    """The regions of this pattern."""
    found = propose(parse_graph(text), layouts=("nchw", "nhwc"), numerics="half", patterns=patterns)
    return [region for region in found if region.pattern == "block"]


def test_a_bottleneck_is_one_region() -> None:
    (region,) = blocks(NET)
    assert region.nodes == ("a", "p", "b", "q", "c", "d", "y")
    assert (region.args, region.constants, region.results) == (("x",), ("w0", "w1", "w2"), ("y",))
    (problem,) = region.problems
    assert isinstance(problem, SubgraphProblem)
    assert problem.layout == "nhwc"


def test_the_residual_may_be_another_value() -> None:
    (region,) = blocks(NET.replace("(%c, %x)", "(%c, %z)"))
    assert region.args == ("x", "z")


def test_it_is_proposed_only_where_an_engine_asks() -> None:
    assert blocks(NET, ()) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return %y", "return %y, %p"),
        ("return %y", "return %y, %b"),
        ("fp16", "fp32"),
        ("constant %w1", "input %w1"),
        ("%w1, None, (1, 1), (1, 1), (1, 1)", "%w1, None, (1, 1), (2, 2), (2, 2)"),
        ("%p: fp16[2,64,6,6] = aten.relu.default(%a)", "%p: fp16[2,64,6,6] = aten.add.Tensor(%a, %x)"),
    ],
    ids=["first result returned", "sum returned", "fp32", "a weight that changes", "dilation", "a residual inside"],
)
def test_other_chains_are_none(before: str, after: str) -> None:
    assert blocks(NET.replace(before, after)) == []
