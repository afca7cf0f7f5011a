"""Checks that an executable computes the right values, also while the next launch begins. Not a test module."""

import math

import torch

from convoy.engines.base import Buffers
from convoy.engines.dynamic_weight import build
from convoy.measurement.accuracy import judge, make_data


def faults(engine, problem, target, knobs=None, *, tf32=False):
    """The faults of an engine on integer and normal data, in words; `tf32`: whether its products may be TF32's."""
    support = engine.accepts(problem, target)
    assert support, support.reason
    chosen = knobs or engine.space(problem, target)[0]
    executable = build(engine, problem, chosen, target)
    assert executable.workspace_bytes == engine.workspace_bytes(problem, chosen)
    kinds = ("integer", "normal")
    # PyTorch's own kernels, which may be inside, take TF32 products for fp32 here.
    tf32 = tf32 or (engine.id == "pruned.channels_gpu" and problem.x_dtype == "fp32")
    verdicts = [
        judge(executable, engine.family, problem, make_data(problem, 1, k, "cuda"), k, tf32=tf32) for k in kinds
    ]
    return [f"{problem} [{chosen}]: {verdict.reason}" for verdict in verdicts if not verdict.ok]


def check_chain(executable, data, packed):
    """Launches of which each reads what the one before wrote: bits are those of launches that are waited for."""
    results = [torch.empty_like(data.args[1]) for _ in range(8)]

    def chain():
        given = data.args
        for y in results:
            executable.launch(Buffers(given, [y], packed), None)
            given = (y, y)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    stream.synchronize()
    given = data.args
    for y in results:
        expected = torch.empty_like(y)
        executable.launch(Buffers(given, [expected], packed), None)
        torch.cuda.synchronize()
        assert expected.isfinite().all()
        assert torch.equal(y, expected)
        given = (expected, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        for y in results:
            y.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(results[-1], expected)
