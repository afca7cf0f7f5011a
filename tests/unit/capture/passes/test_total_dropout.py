"""A dropout of everything draws no random numbers, in a training step and under torch.compile, as in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from convoy.capture.draft import Draft
from convoy.capture.passes.total_dropout import total_dropout
from convoy.engines.interpret import compile_graph
from convoy.graph.text import parse_graph


@pytest.mark.parametrize("probability", [1.0, 0.5])
def test_a_dropout_of_everything_is_a_product_with_zero(probability: float):
    text = f"""graph 1
input %x: fp32[4]
%y: fp32[4], %m: bool[4] = aten.native_dropout.default(%x, {probability}, True)
return %y, %m
"""
    draft = Draft.of(parse_graph(text), {})
    total_dropout(draft)
    graph, _ = draft.finish()
    if probability < 1:
        assert [node.op for node in graph.nodes] == ["aten.native_dropout.default"]
        return
    x, state = torch.tensor([1.0, -2.0, float("inf"), float("nan")]), torch.get_rng_state()
    y, mask = compile_graph(graph)([x])
    torch.testing.assert_close(y, nn.functional.dropout(x, 1.0), equal_nan=True)
    assert not mask.any()
    assert torch.equal(torch.get_rng_state(), state)
