"""Checks of engines for subgraphs with one result in the dtype of their first input. Not a test module."""

from __future__ import annotations

import torch

from convoy.engines.base import Buffers, Engine
from convoy.engines.subgraph import parse_subgraph
from convoy.measurement.accuracy import judge, make_data
from convoy.problem import SubgraphProblem
from convoy.target import Target


def assert_every_setting_is_right(engine: Engine, problem: SubgraphProblem, target: Target) -> None:
    """Each setting of the engine's space is within bounds of float64."""
    assert engine.supports(problem, target), engine.supports(problem, target).reason
    for knobs in engine.space(problem, target):
        executable = engine.build(problem, knobs, target)
        data = make_data(problem, 5, "normal", "cuda")
        verdict = judge(executable, engine.family, problem, data, "normal")
        assert verdict.ok, f"[{knobs}]: {verdict.reason}"


def assert_replays_give_the_same_bits(engine: Engine, problem: SubgraphProblem, target: Target) -> None:
    """Twenty replays of a captured graph, over garbage, give the bits of an eager launch."""
    executable = engine.build(problem, engine.space(problem, target)[0], target)
    data = make_data(problem, 6, "normal", "cuda")
    packed = executable.pack(data.constants)
    graph = parse_subgraph(problem.text)
    shape = graph.values[graph.outputs[0]].spec.shape
    y = torch.empty(shape, dtype=data.args[0].dtype, device="cuda").contiguous(memory_format=torch.channels_last)
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    executable.launch(Buffers(data.args, [y], packed), workspace)
    torch.cuda.synchronize()
    eager = y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executable.launch(Buffers(data.args, [y], packed), workspace)
    for _ in range(20):
        y.fill_(torch.nan)
        workspace.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, eager)
