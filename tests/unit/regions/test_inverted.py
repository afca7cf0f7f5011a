"""The three convolutions of an inverted residual block as one region."""

from __future__ import annotations

import pytest

from convoy.graph.text import parse_graph
from convoy.problem import SubgraphProblem
from convoy.regions import propose
from convoy.regions.region import Region

WIDE, NARROW = "fp16[2,48,6,6]", "fp16[2,16,6,6]"
NET = f"""graph 1
input %x: {NARROW}
input %z: {NARROW}
constant %w0: fp16[48,16,1,1]
constant %w1: fp16[48,1,3,3]
constant %w2: fp16[16,48,1,1]
%a: {WIDE} = conv2d(%x, %w0, None, (1, 1), (0, 0), (1, 1), 1)
%p: {WIDE} = aten.hardtanh.default(%a, 0, 6)
%b: {WIDE} = conv2d(%p, %w1, None, (1, 1), (1, 1), (1, 1), 48)
%q: {WIDE} = aten.hardtanh.default(%b, 0, 6)
%c: {NARROW} = conv2d(%q, %w2, None, (1, 1), (0, 0), (1, 1), 1)
%d: {NARROW} = aten.add.Tensor(%c, %x)
return %d
"""


def blocks(text: str, patterns: tuple[str, ...] = ("inverted",)) -> list[Region]:
    """The regions of this pattern."""
    found = propose(parse_graph(text), layouts=("nchw", "nhwc"), numerics="half", patterns=patterns)
    return [region for region in found if region.pattern == "inverted"]


def test_a_block_is_one_region() -> None:
    (region,) = blocks(NET)
    assert region.nodes == ("a", "p", "b", "q", "c", "d")
    assert (region.args, region.constants, region.results) == (("x",), ("w0", "w1", "w2"), ("d",))
    (problem,) = region.problems
    assert isinstance(problem, SubgraphProblem)
    assert problem.layout == "nhwc"


def test_another_residual_and_an_activation_at_the_end_stay_outside() -> None:
    (region,) = blocks(NET.replace("(%c, %x)", "(%c, %z)"))
    assert (region.args, region.results) == (("x",), ("c",))
    (region,) = blocks(NET.replace("return %d", f"%e: {NARROW} = aten.relu.default(%d)\nreturn %e"))
    assert region.results == ("d",)


def test_with_stride_2_a_residual_of_the_same_shape_stays_outside() -> None:
    """An image of one pixel keeps its shape."""
    text = NET.replace("6,6]", "1,1]").replace("%w1, None, (1, 1)", "%w1, None, (2, 2)")
    (region,) = blocks(text)
    assert region.results == ("c",)


def test_it_is_proposed_only_where_an_engine_asks() -> None:
    assert blocks(NET, ()) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return %d", "return %d, %p"),
        ("return %d", "return %d, %b"),
        ("fp16", "fp32"),
        ("constant %w1", "input %w1"),
        ("%w1, None, (1, 1), (1, 1), (1, 1)", "%w1, None, (1, 1), (2, 2), (2, 2)"),
        (f"%q: {WIDE} = aten.hardtanh.default(%b, 0, 6)", f"%q: {WIDE} = aten.add.Tensor(%b, %p)"),
        ("(1, 1), (1, 1), (1, 1), 48)", "(1, 1), (1, 1), (1, 1), 24)"),
    ],
    ids=[
        "first result returned",
        "sum returned",
        "fp32",
        "a weight that changes",
        "dilation",
        "a residual inside",
        "groups",
    ],
)
def test_other_chains_are_none(before: str, after: str) -> None:
    text = NET.replace(before, after)
    assert blocks(text.replace("%w1: fp16[48,1", "%w1: fp16[48,2") if after.endswith("24)") else text) == []
