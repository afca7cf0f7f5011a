"""triton.batch_norm on the GPU: every setting within bounds, in a captured graph, the same bits every time, into slices."""

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.subgraph import parse_subgraph, torch_format
from convoy.engines.triton.batch_norm import ENGINE
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from tests.unit.engines import norm_cases
from tests.unit.engines.norm_cases import backward, forward

pytestmark = pytest.mark.gpu

SHAPES = {
    **norm_cases.CASES,
    "stem": (8, 64, 112, 112, "bf16", "relu"),
    "residual block": (8, 256, 56, 56, "bf16", "add relu"),
    "last block": (8, 2048, 7, 7, "fp16", "add relu"),
    "branch": (32, 24, 14, 14, "bf16", "relu"),
}


@pytest.fixture(scope="module")
def target():
    return detect_target("cuda")


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    monkeypatch.setattr(norm_cases, "CASES", SHAPES)


def results(problem):
    graph = parse_subgraph(problem.text)
    made = [
        torch.empty(graph.values[n].spec.shape, device="cuda", dtype=_dtype(graph.values[n].spec))
        for n in graph.outputs
    ]
    return [t.to(memory_format=torch_format(problem.layout, t.dim())) for t in made]


def _dtype(spec):
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[spec.dtype]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "make",
    [forward, lambda name: forward(name, unread=True), backward, lambda name: backward(name, masked=True)],
    ids=["forward", "unread", "backward", "masked"],
)
def test_every_setting_is_right(name, make, target):
    problem = make(name)
    for knobs in ENGINE.space(problem, target):
        executable = ENGINE.build(problem, knobs, target)
        data = make_data(problem, 5, "normal", "cuda")
        verdict = judge(executable, ENGINE.family, problem, data, "normal")
        assert verdict.ok, f"[{knobs}]: {verdict.reason}"


@pytest.mark.parametrize("make", [forward, backward], ids=["forward", "backward"])
def test_replays_of_a_graph_give_the_same_bits(make, target):
    problem = make("residual block")
    executable = ENGINE.build(problem, ENGINE.space(problem, target)[0], target)
    data = make_data(problem, 6, "normal", "cuda")
    made = results(problem)
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    executable.launch(Buffers(data.args, made, ()), workspace)
    torch.cuda.synchronize()
    wanted = [t.clone() for t in made]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executable.launch(Buffers(data.args, made, ()), workspace)
    for _ in range(100):
        for t in made:
            t.fill_(float("nan"))
        workspace.fill_(255)
        graph.replay()
        assert all(torch.equal(found, one) for found, one in zip(made, wanted, strict=True))


def test_a_result_in_a_slice_leaves_the_rest_alone(target):
    problem = forward("relu")
    executable = ENGINE.build(problem, ENGINE.space(problem, target)[0], target)
    index = executable.norm.results.index("y")
    data = make_data(problem, 7, "normal", "cuda")
    made = results(problem)
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    executable.launch(Buffers(data.args, made, ()), workspace)
    n, c, h, w = made[index].shape
    assert executable.accept_slice(index, 2 * c, c)
    whole = torch.full((n, 2 * c, h, w), 7.0, device="cuda").to(memory_format=torch.channels_last)
    into = list(made)
    into[index] = whole[:, c:]
    executable.launch(Buffers(data.args, into, ()), workspace)
    assert torch.equal(whole[:, c:], made[index])
    assert bool((whole[:, :c] == 7.0).all())
