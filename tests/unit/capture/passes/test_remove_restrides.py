"""Views by strides: those that are reshapes become such, any other is left for capture to refuse."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from convoy.capture.passes.remove_restrides import remove_restrides


def traced(function, *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def left(module: fx.GraphModule) -> int:
    return sum("as_strided" in str(node.target) for node in module.graph.nodes)


def pooled(x: torch.Tensor) -> torch.Tensor:
    return x.mean((2, 3), True).as_strided((2, 5, 1, 1), (5, 1, 5, 5)) * 2


def scattered(g: torch.Tensor) -> torch.Tensor:
    zeros = g.new_zeros([20])
    inner = torch.ops.aten.copy(zeros.as_strided((2, 5), (5, 1), 0), g)
    return torch.ops.aten.as_strided_scatter(zeros, inner, (2, 5), (5, 1), 0).as_strided((2, 5, 1, 1), (5, 1, 1, 1), 0)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (pooled, torch.randn(2, 5, 3, 3)),
        (pooled, torch.randn(2, 5, 3, 3).contiguous(memory_format=torch.channels_last)),
        (scattered, torch.randn(2, 5)),
    ],
)
def test_what_is_a_reshape_becomes_one(function, x: torch.Tensor):
    module = traced(function, x)
    assert left(module) > 0
    remove_restrides(module.graph)
    module.recompile()
    assert left(module) == 0
    assert torch.equal(module(x), function(x))


@pytest.mark.parametrize(
    "view",
    [
        ((5, 2), (1, 5)),  # transposed
        ((2, 5), (0, 1)),  # repeated
        ((2, 4), (5, 1)),  # some left out
        ((2, 5), (5, 1), 0),  # of another value's storage: see below
    ],
)
def test_what_moves_elements_stays(view):
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).as_strided(*view)

    transposed = torch.randn(5, 2).t() if len(view) == 3 else torch.randn(2, 5)
    module = traced(function, transposed)
    remove_restrides(module.graph)
    assert left(module) == 1


def test_zeros_that_show_stay():
    def function(g: torch.Tensor) -> torch.Tensor:
        zeros = g.new_zeros([20])
        return torch.ops.aten.as_strided_scatter(zeros, g, (2, 5), (10, 1), 0).as_strided((2, 5), (5, 1), 0)

    module = traced(function, torch.randn(2, 5))
    remove_restrides(module.graph)
    assert left(module) == 2
