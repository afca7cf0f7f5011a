"""The whole net and its parts between points that every path passes: what is proposed, how many, and from which graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.graph.ir import Graph
from convoy.graph.text import parse_graph
from convoy.problem import EngineConfig
from convoy.regions import propose
from convoy.regions.whole import PATTERN, WholeScope, whole_regions
from convoy.selection import solve
from convoy.selection.problem import Candidate, RegionNodes, SelectionProblem

EVERY = WholeScope(parts=9, stages=True)
LAYOUTS = ("nchw", "nhwc")


def net(blocks: int, side: int = 32) -> Graph:
    """A first layer and residual blocks of a convolution, a normalisation, a linear layer and an addition."""
    image = f"fp32[1,32,{side},{side}]"
    lines = ["graph 1", f"input %x: fp32[1,3,{side},{side}]", "constant %w: fp32[32,3,3,3]"]
    lines += [f"constant %{kind}{i}: {spec}" for i in range(blocks)
              for kind, spec in (("v", "fp32[32,1,7,7]"), ("g", "fp32[32]"), ("l", "fp32[32,32]"))]  # fmt: skip
    lines.append(f"%b0: {image} = conv2d(%x, %w, None, (1, 1), (1, 1), (1, 1), 1)")
    last = f"fp32[1,{side},{side},32]"
    for i in range(blocks):
        lines += [
            f"%c{i}: {image} = conv2d(%b{i}, %v{i}, None, (1, 1), (3, 3), (1, 1), 32)",
            f"%p{i}: {last} = aten.permute.default(%c{i}, (0, 2, 3, 1))",
            f"%n{i}: {last} = aten.layer_norm.default(%p{i}, (32,), %g{i})",
            f"%m{i}: {last} = aten.linear.default(%n{i}, %l{i})",
            f"%q{i}: {image} = aten.permute.default(%m{i}, (0, 3, 1, 2))",
            f"%b{i + 1}: {image} = aten.add.Tensor(%q{i}, %b{i})",
        ]
    return parse_graph("\n".join([*lines, f"return %b{blocks}", ""]))


def test_the_whole_net_in_every_format_and_each_block_in_nhwc() -> None:
    graph = net(3)
    whole, *parts = whole_regions(graph, LAYOUTS, EVERY)
    assert whole.nodes == tuple(node.name for node in graph.nodes)
    assert [problem.layout for problem in whole.problems] == ["nchw", "nhwc"]
    assert (whole.args, whole.results) == (("x",), ("b3",))
    blocks = [part for part in parts if len(part.nodes) == 6]
    assert [part.nodes[0] for part in blocks] == ["c0", "c1", "c2"]
    assert len({part.problems[0].key for part in blocks}) == 1  # alike: measured once
    assert all([problem.layout for problem in part.problems] == ["nhwc"] for part in parts)
    assert [part.results for part in blocks] == [("b1",), ("b2",), ("b3",)]


@pytest.mark.parametrize(("parts", "most"), [(0, 0), (1, 1), (9, 2)])
def test_the_number_of_different_parts_is_bounded(parts: int, most: int) -> None:
    found = whole_regions(net(3), LAYOUTS, WholeScope(parts, stages=parts > 1))[1:]
    assert len({part.problems[0].key for part in found}) <= most


def test_what_epilogues_fuse_as_well_is_no_part() -> None:
    image = "fp32[1,32,32,32]"
    conv = "conv2d(%{}, %w, None, (1, 1), (1, 1), (1, 1), 1)"
    text = f"""graph 1
input %x: {image}
constant %w: fp32[32,32,3,3]
%a: {image} = {conv.format("x")}
%b: {image} = {conv.format("a")}
%r: {image} = aten.relu.default(%b)
%y: {image} = aten.add.Tensor(%r, %x)
%c: {image} = {conv.format("y")}
%d: {image} = {conv.format("c")}
%z: {image} = aten.add.Tensor(%d, %y)
return %z
"""
    assert len(whole_regions(parse_graph(text), LAYOUTS, EVERY)) == 1


def test_small_nets_training_and_random_numbers_have_none() -> None:
    assert not whole_regions(net(1, side=4), LAYOUTS, EVERY)
    graph = net(1)
    weight = {**graph.values, "w": replace(graph.values["w"], kind="input")}
    assert not whole_regions(replace(graph, inputs=("x", "w"), values=weight), LAYOUTS, EVERY)
    drawn = [
        replace(node, op="aten.rand_like.default", args=node.args[:1], kwargs=()) if node.name == "p0" else node
        for node in graph.nodes
    ]
    assert not whole_regions(replace(graph, nodes=tuple(drawn)), LAYOUTS, EVERY)


def test_they_are_proposed_for_the_pattern_alone() -> None:
    graph = net(2)
    assert not [r for r in propose(graph, layouts=LAYOUTS, numerics="as_torch") if r.pattern == PATTERN]
    found = propose(graph, layouts=LAYOUTS, numerics="as_torch", patterns=(PATTERN,))
    assert len([r for r in found if r.pattern == PATTERN]) > 2


@pytest.mark.parametrize(("whole_us", "block_us", "chosen"), [(50.0, 40.0, 1), (90.0, 25.0, 4), (200.0, 90.0, 19)])
def test_the_exact_choice_takes_the_net_its_parts_or_its_layers_whichever_is_faster(
    whole_us: float, block_us: float, chosen: int
) -> None:
    """Three blocks of six nodes, and the first layer: each node takes 5 µs by itself."""
    graph = net(3)
    regions = propose(graph, layouts=LAYOUTS, numerics="as_torch", patterns=(PATTERN,))
    offered = [r for r in regions if len(r.nodes) in (1, 6, len(graph.nodes))]
    offered = [r for r in offered if len(r.nodes) == 1 or r.pattern == PATTERN]
    times = {1: 5.0, 6: block_us, len(graph.nodes): whole_us}
    problem = SelectionProblem(
        nodes=tuple(node.name for node in graph.nodes),
        inputs=graph.inputs,
        outputs=graph.outputs,
        regions=tuple(RegionNodes(r.id, r.nodes, r.args, r.results) for r in offered),
        candidates=tuple(
            Candidate(i, p.key, EngineConfig("inductor.whole"), p.layout, times[len(r.nodes)])
            for i, r in enumerate(offered)
            for p in r.problems
        ),
        value_layouts={
            v.name: LAYOUTS for v in graph.values.values() if v.kind != "constant" and len(v.spec.shape) == 4
        },
        value_bytes={v.name: v.spec.size_bytes for v in graph.values.values()},
        convert_us={(v, a, b): 1.0 for v in graph.values for a in LAYOUTS for b in LAYOUTS if a != b},
    )
    assert len(solve(problem).chosen) == chosen
