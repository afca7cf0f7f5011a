"""cuda.expand_depthwise on the GPU: exact on integers, the same bits in every replay, and in a net."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.base import Buffers
from convoy.engines.hopper.chains.expand_depthwise import ENGINE
from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_problem import inverted_subgraph
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.measurement.oracle import oracle
from convoy.pipeline import optimize_model
from tests.unit.engines.dealt import dealt

pytestmark = pytest.mark.gpu

FIRST = InvertedResidual(3, 112, 112, 16, 96, 96, 3, 2, "fp16", ("relu", "relu"), residual=False, projects=False)
BLOCKS = {
    "EfficientNet-B0, first": FIRST,
    "EfficientNet-B0, second": replace(FIRST, n=5, h=56, w=56, c=24, mid=144, k=144, stride=1, dtype="bf16"),
    "EfficientNet-B0, third": replace(FIRST, n=4, h=56, w=56, c=24, mid=144, k=144, taps=5),
    "EfficientNet-B0, one image": replace(FIRST, n=1, h=14, w=14, c=80, mid=480, k=480, taps=5, stride=1, dtype="bf16"),
    "EfficientNet-B0, last": replace(FIRST, n=1, h=7, w=7, c=192, mid=1152, k=1152, stride=1),
    "half of the last channels, odd sides": replace(FIRST, h=29, w=23, c=24, mid=72, k=72, taps=5, dtype="bf16"),
    "relu6": replace(FIRST, h=27, w=31, activations=("relu6", "relu6")),
    "silu": replace(FIRST, n=2, h=28, w=28, c=40, mid=240, k=240, taps=5, stride=1, activations=("silu", "silu")),
    "hardswish": replace(FIRST, h=13, w=9, dtype="bf16", activations=("hardswish", "hardswish")),
}
REPLAYS = 200


@pytest.fixture(scope="module")
def target():
    found = detect_target("cuda")
    if found.capability < 80:
        pytest.skip("made for compute capability 8.0 and newer")
    return found


def launched(executable, data, block):
    """The buffers of one launch, whose result was not a number before."""
    y = torch.full((block.n, block.k, block.p, block.q), float("nan"), dtype=data.args[0].dtype, device="cuda")
    buffers = Buffers(data.args, [y.contiguous(memory_format=torch.channels_last)], executable.pack(data.constants))
    executable.launch(buffers, None)
    return buffers


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("name", BLOCKS)
def test_settings_are_exact_on_integers_and_near_on_others(name, part, target):
    block, problem = BLOCKS[name], inverted_subgraph(BLOCKS[name])
    integer, normal = (make_data(problem, 3 + i, kind, "cuda") for i, kind in enumerate(("integer", "normal")))
    (exact,), near = oracle(problem, integer), oracle(problem, normal)
    for knobs in dealt(ENGINE.space(problem, target), part, 2):
        executable = ENGINE.build(problem, knobs, target)
        y = launched(executable, integer, block).results[0]
        if not {"silu", "hardswish"} & set(block.activations):
            assert torch.equal(y.double(), exact.to(y.device)), str(knobs)
        verdict = judge(executable, ENGINE.family, problem, normal, "normal", exact=near)
        assert verdict.ok, f"[{knobs}]: {verdict.reason}"


@pytest.mark.parametrize("name", ["EfficientNet-B0, second", "EfficientNet-B0, third", "EfficientNet-B0, last"])
def test_a_graph_gives_the_same_bits_in_every_replay_beside_other_work(name, target):
    problem = inverted_subgraph(BLOCKS[name])
    side, work = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for knobs in ENGINE.space(problem, target)[:6]:
        executable = ENGINE.build(problem, knobs, target)
        buffers = launched(executable, make_data(problem, 4, "normal", "cuda"), BLOCKS[name])
        torch.cuda.synchronize()
        before, graph = buffers.results[0].clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            executable.launch(buffers, None)
        for _ in range(REPLAYS):
            graph.replay()
            with torch.cuda.stream(side):
                torch.mm(work, work)
        torch.cuda.synchronize()
        assert torch.equal(before, buffers.results[0]), str(knobs)


class Block(nn.Module):
    """A 1x1 and a depthwise convolution with batch norms, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(24, 144, 1, bias=False), nn.BatchNorm2d(144), nn.SiLU())
        self.filter = nn.Sequential(
            nn.Conv2d(144, 144, 3, padding=1, groups=144, bias=False), nn.BatchNorm2d(144), nn.SiLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result has two readers."""
        filtered = self.filter(self.expand(x))
        return filtered * filtered.mean((2, 3), keepdim=True).sigmoid()


def test_a_net_runs_with_it_where_it_is_named(tmp_path: Path, target):
    model, x = Block().eval().half().cuda(), torch.randn(2, 24, 56, 56, device="cuda", dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    settings = convoy.Settings(
        db=tmp_path / "perf.db", only_engines=(ENGINE.id,), layout="nhwc", solver="single", effort="none"
    )
    result = optimize_model(model, (x,), name="block", settings=settings)
    assert [layer.engine for layer in result.summary.layers if layer.engine == ENGINE.id] == [ENGINE.id]
    with torch.no_grad():
        wanted, made = copy.deepcopy(model).double()(x.double()), result.program(x)
    assert (made.double() - wanted).norm() < 5e-3 * wanted.norm()
