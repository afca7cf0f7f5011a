"""Weights for subgraphs of many layers: values neither overflow nor vanish, and do not depend on the kind of data."""

from __future__ import annotations

import pytest
import torch

from convoy.engines.interpret import compile_graph
from convoy.graph.text import parse_graph
from convoy.measurement.data import make_data
from convoy.measurement.net_weights import MANY_LAYERS, net_weights
from convoy.problem import SubgraphProblem

SPEC = "fp32[1,16,8,8]"


def chain(layers: int, *, residual: bool) -> str:
    """Convolutions with biases, in a chain or each with its input added."""
    lines = ["graph 1", f"input %x0: {SPEC}"]
    lines += [f"constant %w{i}: fp32[16,16,3,3]\nconstant %b{i}: fp32[16]" for i in range(layers)]
    for i in range(layers):
        made = f"c{i}" if residual else f"x{i + 1}"
        lines.append(f"%{made}: {SPEC} = conv2d(%x{i}, %w{i}, %b{i}, (1, 1), (1, 1), (1, 1), 1)")
        if residual:
            lines.append(f"%x{i + 1}: {SPEC} = aten.add.Tensor(%c{i}, %x{i})")
    return "\n".join([*lines, f"return %x{layers}", ""])


@pytest.mark.parametrize("residual", [False, True])
def test_values_keep_their_size_through_many_layers(residual: bool) -> None:
    problem = SubgraphProblem(chain(40, residual=residual), "nhwc")
    data = make_data(problem, 0)
    (y,) = compile_graph(parse_graph(problem.text))(data.args, data.constants)
    assert 0.3 < float(y.std()) < 5000  # fp16 reaches 65504; without scaling, 40 layers reach 1e43


def test_weights_are_the_same_for_every_kind_of_data_and_few_layers_are_drawn_as_before() -> None:
    problem = SubgraphProblem(chain(MANY_LAYERS, residual=False), "nhwc")
    first, second = (make_data(problem, 0, kind).constants for kind in ("integer", "normal"))
    assert all(map(torch.equal, first, second))
    assert net_weights(parse_graph(chain(MANY_LAYERS - 1, residual=False)), 0, "cpu") is None
