"""A 1x1 convolution and the depthwise one behind it as one region."""

from __future__ import annotations

import pytest

from convoy.graph.text import parse_graph
from convoy.problem import SubgraphProblem
from convoy.regions import propose
from convoy.regions.region import Region

WIDE, NARROW = "fp16[2,48,6,6]", "fp16[2,16,6,6]"
NET = f"""graph 1
input %x: {NARROW}
constant %w0: fp16[48,16,1,1]
constant %w1: fp16[48,1,3,3]
constant %w2: fp16[16,48,1,1]
%a: {WIDE} = conv2d(%x, %w0, None, (1, 1), (0, 0), (1, 1), 1)
%p: {WIDE} = aten.silu.default(%a)
%b: {WIDE} = conv2d(%p, %w1, None, (1, 1), (1, 1), (1, 1), 48)
%q: {WIDE} = aten.silu.default(%b)
%m: fp16[2,48,1,1] = aten.mean.dim(%q, (2, 3), True)
%g: {WIDE} = aten.mul.Tensor(%q, %m)
%c: {NARROW} = conv2d(%g, %w2, None, (1, 1), (0, 0), (1, 1), 1)
return %c
"""
UNGATED = NET.replace(f"%g: {WIDE} = aten.mul.Tensor(%q, %m)\n", "").replace("%g", "%q")
UNGATED = UNGATED.replace("%m: fp16[2,48,1,1] = aten.mean.dim(%q, (2, 3), True)\n", "")


def found(text: str, *patterns: str) -> list[Region]:
    """The regions of some patterns."""
    regions = propose(parse_graph(text), layouts=("nchw", "nhwc"), numerics="half", patterns=patterns)
    return [region for region in regions if region.pattern in patterns]


def test_both_layers_are_one_region_whoever_reads_the_result() -> None:
    (region,) = found(NET, "expanded")
    assert region.nodes == ("a", "p", "b", "q")
    assert (region.args, region.constants, region.results) == (("x",), ("w0", "w1"), ("q",))
    (problem,) = region.problems
    assert isinstance(problem, SubgraphProblem)
    assert problem.layout == "nhwc"


def test_a_returned_result_is_no_obstacle() -> None:
    (region,) = found(NET.replace("return %c", "return %c, %q"), "expanded")
    assert region.results == ("q",)


def test_an_activation_stays_outside_where_others_read_the_sums() -> None:
    (region,) = found(NET.replace("return %c", "return %c, %b"), "expanded")
    assert (region.nodes, region.results) == (("a", "p", "b"), ("b",))


def test_it_stands_beside_the_whole_block() -> None:
    assert [region.pattern for region in found(NET, "expanded", "inverted")] == ["expanded"]
    regions = found(UNGATED, "expanded", "inverted")
    assert {region.pattern: region.nodes for region in regions} == {
        "expanded": ("a", "p", "b", "q"),
        "inverted": ("a", "p", "b", "q", "c"),
    }


def test_it_is_proposed_only_where_an_engine_asks() -> None:
    patterns = {region.pattern for region in propose(parse_graph(NET), layouts=("nhwc",), numerics="half")}
    assert "expanded" not in patterns


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return %c", "return %c, %p"),
        ("return %c", "return %c, %a"),
        ("fp16", "fp32"),
        ("constant %w1", "input %w1"),
        ("%w1, None, (1, 1), (1, 1), (1, 1)", "%w1, None, (1, 1), (2, 2), (2, 2)"),
        ("%w0, None, (1, 1), (0, 0), (1, 1), 1", "%w0, None, (1, 1), (0, 0), (1, 1), 2"),
        (f"%g: {WIDE} = aten.mul.Tensor(%q, %m)", f"%g: {WIDE} = aten.mul.Tensor(%p, %m)"),
    ],
    ids=["first result returned", "sum returned", "fp32", "a weight that changes", "dilation", "groups", "read twice"],
)
def test_other_chains_are_none(before: str, after: str) -> None:
    text = NET.replace(before, after)
    assert found(text.replace("%w0: fp16[48,16", "%w0: fp16[48,8") if after.endswith(" 2") else text, "expanded") == []
