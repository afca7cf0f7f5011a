"""Regions of a backward pass, and of convolutions whose weight is computed or given."""

from __future__ import annotations

import pytest
import torch

from convoy.engines.interpret import compile_graph
from convoy.graph.text import parse_graph
from convoy.graph.verify import verify
from convoy.problem import Epilogue
from convoy.regions import Region, propose

BACKWARD = """\
graph 1
input %x: fp64[2,3,8,9]
input %dy: fp64[2,4,4,5]
input %weight: fp64[4,3,3,3]
%dx: fp64[2,3,8,9] = conv2d_dgrad(%dy, %weight, (8, 9), (2, 2), (1, 1), (1, 1), 1)
%dw: fp64[4,3,3,3] = conv2d_wgrad(%x, %dy, (3, 3), (2, 2), (1, 1), (1, 1), 1)
%db: fp64[4] = aten.sum.dim_IntList(%dy, (0, 2, 3))
return %dx, %dw, %db
"""

FRESH = """\
graph 1
input %x: fp32[2,3,8,8]
input %master: fp32[4,3,3,3]
input %bias: fp16[4]
%half: fp16[2,3,8,8] = aten._to_copy.default(%x, dtype=dtype.fp16)
%weight: fp16[4,3,3,3] = aten._to_copy.default(%master, dtype=dtype.fp16)
%y: fp16[2,4,8,8] = conv2d(%half, %weight, %bias, (1, 1), (1, 1), (1, 1), 1)
%a: fp16[2,4,8,8] = aten.relu.default(%y)
return %a
"""


def proposed(text: str) -> dict[str, Region]:
    graph = parse_graph(text)
    verify(graph)
    return {r.id: r for r in propose(graph, layouts=("nchw", "nhwc"), numerics="strict")}


def test_each_direction_is_a_region_and_the_bias_may_go_along():
    found = proposed(BACKWARD)
    assert list(found) == ["dgrad(dx)", "wgrad(dw)", "wgrad(dw+db)", "op(db)"]
    assert found["dgrad(dx)"].args == ("dy", "weight")
    assert found["wgrad(dw+db)"].args == ("x", "dy")
    assert found["wgrad(dw+db)"].results == ("dw", "db")
    assert {p.epilogue for p in found["wgrad(dw+db)"].problems} == {Epilogue(bias=True)}
    assert [p.layout for p in found["dgrad(dx)"].problems] == ["nchw", "nhwc"]
    assert all(p.numerics == "strict" for p in found["wgrad(dw)"].problems)


@pytest.mark.parametrize("change", [("%dy, (0, 2, 3))", "%dy, (0, 2))"), ("%dy, (0, 2, 3))", "%x, (0, 2, 3))")])
def test_another_sum_is_no_bias_gradient(change: tuple[str, str]):
    text = BACKWARD.replace(*change).replace(
        "%db: fp64[4]", "%db: fp64[4,5]" if "(0, 2))" in change[1] else "%db: fp64[3]"
    )
    assert "wgrad(dw+db)" not in proposed(text)


def test_the_nodes_compute_what_autograd_does():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 4, 4, 5, dtype=torch.float64)
    wanted = torch.autograd.grad(torch.conv2d(x, weight, None, 2, 1), (x, weight), dy)
    with torch.no_grad():
        dx, dw, _ = compile_graph(parse_graph(BACKWARD))([x, dy, weight])
    assert torch.allclose(dx, wanted[0])
    assert torch.allclose(dw, wanted[1])


def test_a_weight_that_is_no_constant_is_an_argument():
    found = proposed(FRESH)
    region = found["conv(y+a)"]
    assert (region.args, region.constants) == (("half", "weight", "bias"), ())
    assert all(problem.dynamic_weight for problem in region.problems)


def test_a_constant_bias_beside_a_fresh_weight_stays_an_operator():
    assert "conv(y)" not in proposed(FRESH.replace("input %bias", "constant %bias"))
