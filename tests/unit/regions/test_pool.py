"""Convolution + pooling: which poolings are taken into the convolution's kernel, and which are left where they are."""

from __future__ import annotations

import pytest

from convoy.graph.text import parse_graph
from convoy.graph.verify import verify
from convoy.problem import ConvProblem, Epilogue, Pool
from convoy.regions import Region, propose
from convoy.regions.pool import pool_of

HEAD = """\
graph 1
input %x: fp32[2,3,9,9]
input %r: fp32[2,4,9,9]
constant %w: fp32[4,3,3,3]
constant %b: fp32[4]
%c: fp32[2,4,9,9] = conv2d(%x, %w, %b, (1, 1), (1, 1), (1, 1), 1)
"""
RELU = "%a: fp32[2,4,9,9] = aten.relu.default(%c)\n"
POOL = "%p: fp32[2,4,4,4] = aten.max_pool2d.default(%a, (2, 2), (2, 2))\n"


def proposed(text: str) -> dict[str, Region]:
    graph = parse_graph(HEAD + text)
    verify(graph)
    return {region.id: region for region in propose(graph, layouts=("nchw", "nhwc"), numerics="strict")}


def pooled(text: str) -> dict[str, Region]:
    return {name: region for name, region in proposed(text).items() if region.pattern == "conv_pool"}


def test_the_pooling_behind_an_activation_joins_the_convolution():
    found = proposed(f"{RELU}{POOL}return %p, %r\n")
    assert list(found) == ["conv(c)", "conv(c+a)", "conv_pool(c+a+p)", "op(a)", "op(p)", "glue(a+p)"]
    region = found["conv_pool(c+a+p)"]
    assert (region.args, region.constants, region.results) == (("x",), ("w", "b"), ("p",))
    wanted = Epilogue(True, activation="relu", pool=Pool("max", 2, 2, 2, 2))
    assert [p.epilogue for p in region.problems if isinstance(p, ConvProblem)] == [wanted, wanted]
    assert [p.layout for p in region.problems] == ["nchw", "nhwc"]
    assert {p.numerics for p in region.problems if isinstance(p, ConvProblem)} == {"strict"}


def test_residual_and_activation_before_a_pooling():
    add = "%s: fp32[2,4,9,9] = aten.add.Tensor(%c, %r)\n"
    found = pooled(f"{add}{RELU.replace('%c', '%s')}{POOL}return %p\n")
    assert list(found) == ["conv_pool(c+s+a+p)"]
    assert found["conv_pool(c+s+a+p)"].args == ("x", "r")
    assert str(found["conv_pool(c+s+a+p)"].problems[0]).endswith(":bias+residual+relu+max2x2s2x2p0x0")


def test_a_maximum_changes_places_with_the_relu_behind_it():
    after = "%z: fp32[2,4,4,4] = aten.relu.default(%p)\n"
    found = pooled(f"{POOL.replace('%a', '%c')}{after}return %z, %r\n")
    assert list(found) == ["conv_pool(c+p)", "conv_pool(c+p+z)"]
    assert [str(r.problems[0]).rsplit(":", 1)[1] for r in found.values()] == [
        "bias+max2x2s2x2p0x0",
        "bias+relu+max2x2s2x2p0x0",
    ]
    assert found["conv_pool(c+p+z)"].results == ("z",)


@pytest.mark.parametrize(
    "text",
    [
        # an average does not commute with it; nor does a maximum with what may fall
        POOL.replace("%a", "%c").replace("max_", "avg_") + "%z: fp32[2,4,4,4] = aten.relu.default(%p)\nreturn %z, %r\n",
        POOL.replace("%a", "%c") + "%z: fp32[2,4,4,4] = aten.silu.default(%p)\nreturn %z, %r\n",
        # somebody else reads the maximum
        POOL.replace("%a", "%c") + "%z: fp32[2,4,4,4] = aten.relu.default(%p)\nreturn %z, %p, %r\n",
        # it has had its activation
        RELU + POOL + "%z: fp32[2,4,4,4] = aten.relu.default(%p)\nreturn %z, %r\n",
    ],
)
def test_an_activation_behind_the_pooling_that_must_stay_there(text: str):
    assert all("z" not in region.nodes for region in pooled(text).values())
    assert len(pooled(text)) == 1


@pytest.mark.parametrize(
    ("call", "shape", "pool"),
    [
        ("max_pool2d.default(%a, (3, 3), (2, 2), (1, 1))", "5,5", "max3x3s2x2p1x1"),
        ("max_pool2d.default(%a, 3, 2, 0, 1, True)", "4,4", "max3x3s2x2p0x0c"),
        ("max_pool2d.default(%a, (3, 3))", "3,3", "max3x3s3x3p0x0"),
        ("max_pool2d.default(%a, (3, 2), (), (1, 0), ceil_mode=True)", "4,5", "max3x2s3x2p1x0c"),
        ("avg_pool2d.default(%a, (2, 2), (2, 2))", "4,4", "avg2x2s2x2p0x0"),
        ("avg_pool2d.default(%a, (3, 3), (2, 2), (1, 1))", "5,5", "avg3x3s2x2p1x1i"),
        ("avg_pool2d.default(%a, (3, 3), (2, 2), (1, 1), True, False)", "5,5", "avg3x3s2x2p1x1c"),
        ("adaptive_avg_pool2d.default(%a, (1, 1))", "1,1", "avg9x9s9x9p0x0"),
    ],
)
def test_poolings_are_read_however_their_arguments_are_given(call: str, shape: str, pool: str):
    (found,) = pooled(f"{RELU}%p: fp32[2,4,{shape}] = aten.{call}\nreturn %p, %r\n").values()
    assert str(found.problems[0]).rsplit("+", 1)[1] == pool


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        ("max_pool2d.default(%a, (2, 2), (2, 2), (0, 0), (2, 2))", "4,4"),  # dilated
        ("avg_pool2d.default(%a, (2, 2), (2, 2), (0, 0), False, True, 3)", "4,4"),  # a divisor of its own
        ("adaptive_avg_pool2d.default(%a, (3, 3))", "3,3"),
        ("adaptive_max_pool2d.default(%a, (1, 1))", "1,1"),
        ("max_pool2d.default(%a, (2, 2), (2, 2))", "5,5"),  # a shape that is not its
        ("max_pool2d.default(%a, (2, 2), (2, 2), (2, 2))", "5,5"),  # padding that torch refuses
    ],
)
def test_other_poolings_stay(call: str, shape: str):
    assert not pooled(f"{RELU}%p: fp32[2,4,{shape}] = aten.{call}\nreturn %p, %r\n")


def test_indices_that_somebody_reads_keep_the_pooling_out():
    text = HEAD + RELU + "%p: fp32[2,4,4,4], %i: i64[2,4,4,4] = aten.max_pool2d_with_indices.default(%a, (2, 2))\n"
    read, unread = (
        parse_graph(text + "return %p, %i, %r\n"),
        parse_graph(text.replace("%i: i64[2,4,4,4]", "_") + "return %p, %r\n"),
    )
    assert pool_of(read, read.nodes[-1]) is None
    assert pool_of(unread, unread.nodes[-1]) == Pool("max", 2, 2, 2, 2)


@pytest.mark.parametrize("end", [f"{RELU}{POOL}return %p, %a, %r\n", f"{RELU}{POOL}return %p, %c, %r\n"])
def test_a_value_that_somebody_else_gets_ends_the_region(end: str):
    assert not pooled(end)
