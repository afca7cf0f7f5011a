"""A pruned weight's convolutions are offered with its mask, behind the problems without it."""

from __future__ import annotations

from convoy.graph.text import parse_graph
from convoy.problem import ConvProblem, WeightMask
from convoy.regions import propose

GRAPH = parse_graph("""graph 1
input %x: fp32[2,4,8,8]
constant %w: fp32[4,4,3,3]
constant %v: fp32[4,4,3,3]
%c: fp32[2,4,8,8] = conv2d(%x, %w, None, (1, 1), (1, 1), (1, 1), 1)
%a: fp32[2,4,8,8] = aten.relu.default(%c)
%d: fp32[2,4,8,8] = conv2d(%a, %v, None, (1, 1), (1, 1), (1, 1), 1)
return %d
""")
MASK = WeightMask((4, 4, 3, 3), bytes([1] * 18))


def test_pruned_convolutions_are_offered_twice_and_others_once() -> None:
    plain = {r.id: r for r in propose(GRAPH, layouts=("nchw", "nhwc"), numerics="strict")}
    found = {r.id: r for r in propose(GRAPH, layouts=("nchw", "nhwc"), numerics="strict", masks={"w": MASK})}
    assert set(found) == set(plain)
    for name, region in found.items():
        if name not in ("conv(c)", "conv(c+a)"):
            assert region == plain[name]
            continue
        dense, masked = region.problems[:2], region.problems[2:]
        assert dense == plain[name].problems
        assert [p.layout for p in masked] == ["nchw", "nhwc"]
        for problem, without in zip(masked, dense, strict=True):
            assert isinstance(problem, ConvProblem)
            assert problem.mask == MASK
            assert problem.with_mask(None) == without
