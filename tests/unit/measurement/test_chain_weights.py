"""Data of layers that follow each other: half precision holds every value, and integers stay exact."""

import pytest
import torch

from convoy.engines.hopper.chains.bottleneck_problem import sample
from convoy.graph.text import parse_graph
from convoy.measurement.chain_weights import weights_in_chains
from convoy.measurement.data import make_data
from convoy.measurement.oracle import oracle
from convoy.measurement.subgraph_accuracy import stock_results
from convoy.problem import SubgraphProblem

SMALL = SubgraphProblem(sample().text.replace("56,56]", "6,6]"), "nhwc")
PARALLEL = """graph 1
input %x: fp16[1,8,4,4]
constant %w: fp16[8,8,1,1]
constant %v: fp16[8,8,1,1]
%a: fp16[1,8,4,4] = conv2d(%x, %w, None, (1, 1), (0, 0), (1, 1), 1)
%b: fp16[1,8,4,4] = conv2d(%x, %v, None, (1, 1), (0, 0), (1, 1), 1)
return %a, %b
"""


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_integers_are_exact_in_half_precision(dtype):
    problem = SubgraphProblem(SMALL.text.replace("fp16", dtype), "nhwc")
    data = make_data(problem, 3, "integer")
    (found,), (exact,) = stock_results(problem, data), oracle(problem, data)
    assert torch.equal(found.double(), exact)
    assert exact.abs().max() > 8


def test_normal_values_neither_overflow_nor_vanish():
    data = make_data(SMALL, 3, "normal")
    (exact,) = oracle(SMALL, data)
    assert exact.isfinite().all()
    assert 0.1 < exact.std() < 30


def test_weights_of_parallel_layers_are_as_before():
    assert weights_in_chains(parse_graph(SMALL.text)) == {"w0", "w1", "w2"}
    assert weights_in_chains(parse_graph(PARALLEL)) == frozenset()
