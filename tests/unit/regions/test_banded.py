"""A depthwise convolution with the convolutions round it as one region."""

from __future__ import annotations

import pytest

from convoy.graph.ir import Graph
from convoy.graph.text import parse_graph
from convoy.problem import SubgraphProblem
from convoy.regions import propose
from convoy.regions.region import Region

BLOCK = """graph 1
input %x: fp32[2,8,6,6]
constant %w0: fp32[24,8,1,1]
constant %w1: fp32[24,1,3,3]
constant %w2: fp32[8,24,1,1]
%a: fp32[2,24,6,6] = conv2d(%x, %w0, None, (1, 1), (0, 0), (1, 1), 1)
%p: fp32[2,24,6,6] = aten.relu.default(%a)
%b: fp32[2,24,6,6] = conv2d(%p, %w1, None, (1, 1), (1, 1), (1, 1), 24)
%q: fp32[2,24,6,6] = aten.relu.default(%b)
%c: fp32[2,8,6,6] = conv2d(%q, %w2, None, (1, 1), (0, 0), (1, 1), 1)
%y: fp32[2,8,6,6] = aten.add.Tensor(%c, %x)
return %y
"""

INSIDE = 2 * 24 * 6 * 6 * 4
"""Bytes of a value inside."""


def banded(text: str, bands: int = 1, layouts: tuple[str, ...] = ("nchw", "nhwc")) -> list[Region]:
    graph: Graph = parse_graph(text)
    return [
        r
        for r in propose(graph, layouts=layouts, numerics="strict", patterns=("banded",), band_bytes=bands)
        if r.pattern == "banded"
    ]


def test_a_block_is_one_region() -> None:
    (region,) = banded(BLOCK)
    assert region.nodes == ("a", "p", "b", "q", "c", "y")
    assert (region.args, region.constants, region.results) == (("x",), ("w0", "w1", "w2"), ("y",))
    (problem,) = region.problems
    assert isinstance(problem, SubgraphProblem)
    assert problem.layout == "nhwc"


@pytest.mark.parametrize(
    ("before", "after", "nodes"),
    [
        ("return %y", "return %y, %p", ("b", "q", "c", "y")),
        ("return %y", "return %y, %q", ("a", "p", "b", "q")),
        ("return %y", "return %y, %b", ("a", "p", "b")),
        ("%w2, None, (1, 1), (0, 0)", "%w3, None, (1, 1), (1, 1)", ("a", "p", "b", "q")),
        ("%p: fp32[2,24,6,6] = aten.relu", "%p: fp32[2,24,6,6] = aten.erf", ("b", "q", "c", "y")),
    ],
    ids=["first result returned", "second result returned", "sum returned", "3x3 behind", "no activation"],
)
def test_what_others_see_stays_outside(before: str, after: str, nodes: tuple[str, ...]) -> None:
    other = "constant %w3: fp32[8,24,3,3]\n" if "%w3" in after else ""
    regions = banded(BLOCK.replace("constant %w2", f"{other}constant %w2").replace(before, after))
    assert [region.nodes for region in regions] == [nodes]
    assert set(regions[0].results) == {nodes[-1]}


@pytest.mark.parametrize(
    "text",
    [
        BLOCK.replace("fp32", "fp16"),
        BLOCK.replace("constant %", "input %"),
        BLOCK.replace("[24,1,3,3]", "[24,2,3,3]").replace("(1, 1), 24)", "(1, 1), 12)"),
        BLOCK.replace("return %y", "return %y, %p, %q"),
    ],
    ids=["fp16", "weights that change", "two channels a filter", "all returned"],
)
def test_other_nets_have_none(text: str) -> None:
    assert banded(text) == []


def test_small_values_and_other_formats_are_left_alone() -> None:
    assert banded(BLOCK, layouts=("nchw",)) == banded(BLOCK, bands=INSIDE + 1) == []
    assert len(banded(BLOCK, bands=INSIDE)) == 1
