"""Adaptive average poolings whose windows are alike become ordinary ones: the same numbers, and bits that do not change."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy.capture import capture_training
from convoy.capture.draft import Draft
from convoy.capture.passes.regular_pools import regular_pools
from convoy.capture.passes.remove_identities import remove_identities
from convoy.engines import nondeterminism
from convoy.engines.interpret import compile_graph
from convoy.graph.text import parse_graph
from convoy.pipeline.check import end_to_end
from convoy.settings import Settings

TEXT = """graph 1
input %x: fp32[2,3,{h},{w}]
input %dy: fp32[2,3,{p},{q}]
%y: fp32[2,3,{p},{q}] = aten.{op}.default(%x, ({p}, {q}))
%dx: fp32[2,3,{h},{w}] = aten._adaptive_avg_pool2d_backward.default(%dy, %x)
return %y, %dx
"""


def rewritten(op="_adaptive_avg_pool2d", passes=(regular_pools,), **sides):
    before = parse_graph(TEXT.format(op=op, **sides))
    draft = Draft.of(before, {})
    for rewrite in passes:
        rewrite(draft)
    return before, draft.finish()[0]


@pytest.mark.parametrize("op", ["_adaptive_avg_pool2d", "adaptive_avg_pool2d"])
@pytest.mark.parametrize(("h", "w", "p", "q"), [(8, 8, 4, 4), (6, 10, 2, 5), (7, 7, 1, 1), (4, 4, 4, 4)])
def test_the_same_numbers(op, h, w, p, q):
    before, after = rewritten(op, h=h, w=w, p=p, q=q)
    assert [node.op for node in after.nodes] == ["aten.avg_pool2d.default", "aten.avg_pool2d_backward.default"]
    generator = torch.Generator().manual_seed(1)
    args = [torch.randn(before.values[name].spec.shape, generator=generator) for name in before.inputs]
    for found, wanted in zip(compile_graph(after)(args), compile_graph(before)(args), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("h", "w", "p", "q"), [(7, 8, 4, 4), (8, 7, 4, 4), (2, 2, 4, 4)])
def test_windows_that_differ_stay(h, w, p, q):
    before, after = rewritten(h=h, w=w, p=p, q=q)
    assert [node.op for node in after.nodes] == [node.op for node in before.nodes]


def test_pooling_to_the_size_that_is_there_is_nothing():
    _, after = rewritten(passes=(remove_identities, regular_pools), h=4, w=4, p=4, q=4)
    assert after.nodes == ()
    assert after.outputs == ("x", "dy")


def test_the_gradient_of_such_a_net_is_steady_on_a_gpu():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 5)
    )
    graph = capture_training(net, cross_entropy, (torch.randn(2, 3, 8, 8), torch.arange(2))).captured.graph
    assert not [op for op in nondeterminism.in_aten(graph, "cuda") if "pool" in op]
    assert any(node.op == "aten.avg_pool2d_backward.default" for node in graph.nodes)


@pytest.mark.parametrize("size", [8, 4])
def test_pytorchs_own_step_still_has_the_unsteady_gradient(size):
    """Where bits must not differ from run to run, a slow plan is no reason to go back to it."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 5))
    captured = capture_training(net, cross_entropy, (torch.randn(2, 3, size, size), torch.arange(2))).captured
    assert not [op for op in nondeterminism.in_aten(captured.graph, "cuda") if "pool" in op]
    assert [op for op in nondeterminism.in_aten(captured.as_pytorch, "cuda") if "pool" in op]
    settings = Settings(deterministic=True)
    assert end_to_end.falls_back("slow", "", captured.as_pytorch, "cuda", settings)[0] is False
