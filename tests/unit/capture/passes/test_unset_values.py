"""Memory that is allocated for random numbers holds zeros: small tensors are constants, large ones are made by an operator."""

from __future__ import annotations

import torch

from convoy.capture.draft import Draft
from convoy.capture.passes.fold_constants import SMALL_ELEMENTS
from convoy.capture.passes.unset_values import unset_values
from convoy.engines.interpret import compile_graph
from convoy.graph.text import parse_graph

TEXT = """graph 1
input %x: fp32[4,8,3,3]
%a: fp32[4,8,1,1] = aten.new_empty.default(%x, (4, 8, 1, 1))
%b: fp32[4,8,3,3] = aten.empty_like.default(%x)
%c: bf16[4,1] = aten.empty.memory_format((4, 1), dtype=dtype.bf16, device=device.inputs)
return %a, %b, %c
"""


def test_small_tensors_are_constants():
    draft = Draft.of(parse_graph(TEXT), {})
    unset_values(draft)
    graph, constants = draft.finish()
    assert not graph.nodes
    assert {name: (tuple(t.shape), t.dtype) for name, t in constants.items()} == {
        "a": ((4, 8, 1, 1), torch.float32), "b": ((4, 8, 3, 3), torch.float32), "c": ((4, 1), torch.bfloat16),
    }  # fmt: skip
    assert not any(tensor.any() for tensor in constants.values())


def test_large_tensors_are_made_in_every_run():
    rows = SMALL_ELEMENTS // 4
    text = f"""graph 1
input %x: fp32[{rows},2]
%a: fp32[{rows},5] = aten.new_empty.default(%x, ({rows}, 5), dtype=dtype.fp32)
%b: fp32[{rows},1,1,5] = aten.empty.memory_format(({rows}, 1, 1, 5), device=device.inputs, memory_format=memory_format.nhwc)
return %a, %b
"""
    draft = Draft.of(parse_graph(text), {})
    unset_values(draft)
    graph, constants = draft.finish()
    assert [node.op for node in graph.nodes] == ["aten.new_zeros.default", "aten.zeros.default"]
    assert not constants
    for found in compile_graph(graph)([torch.ones(rows, 2)]):
        assert found.numel() == 5 * rows
        assert not found.any()
