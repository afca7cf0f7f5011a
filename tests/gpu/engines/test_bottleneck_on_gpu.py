"""cuda.bottleneck on the GPU: exact on integers, the same bits in every replay, and in a net."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.base import Buffers
from convoy.engines.hopper.chains.bottleneck import ENGINE
from convoy.engines.hopper.chains.bottleneck_problem import subgraph_of
from convoy.engines.hopper.chains.bottleneck_tile_config import Bottleneck
from convoy.errors import CompileError
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.measurement.oracle import oracle
from convoy.pipeline import optimize_model
from tests.unit.engines.dealt import dealt

pytestmark = pytest.mark.gpu

RELU = ("relu", "relu", "relu")
BLOCKS = {
    "ResNet-50, first stage": Bottleneck(5, 56, 56, 256, 64, 256, "fp16", RELU, "x"),
    "ResNet-50, projected": Bottleneck(2, 56, 56, 64, 64, 256, "bf16", RELU, "other"),
    "ResNet-50, second stage": Bottleneck(3, 28, 28, 512, 128, 512, "fp16", RELU, "x"),
    "ResNet-50, third stage": Bottleneck(2, 14, 14, 1024, 256, 1024, "bf16", RELU, "x"),
    "odd sides": Bottleneck(3, 13, 9, 64, 128, 192, "fp16", ("silu", "none", "relu"), "none"),
}
REPLAYS = 1000


@pytest.fixture(scope="module")
def target():
    found = detect_target("cuda")
    if found.capability != 90:
        pytest.skip("made for compute capability 9.0")
    return found


def launched(executable, data, block):
    """The result of one launch, which was not a number before."""
    shape = (block.n, block.k, block.h, block.w)
    y = torch.full(shape, float("nan"), dtype=data.args[0].dtype, device="cuda")
    buffers = Buffers(data.args, [y.contiguous(memory_format=torch.channels_last)], executable.pack(data.constants))
    executable.launch(buffers, None)
    return buffers


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("name", BLOCKS)
def test_settings_are_exact_on_integers_and_near_on_others(name, part, target):
    block, problem = BLOCKS[name], subgraph_of(BLOCKS[name])
    integer = make_data(problem, 3, "integer", "cuda")
    (exact,) = oracle(problem, integer)
    space = ENGINE.space(problem, target)
    for knobs in dealt(space, part, 2):
        try:
            executable = ENGINE.build(problem, knobs, target)
        except CompileError:
            assert knobs != space[0]  # the default always builds
            continue
        y = launched(executable, integer, block).results[0]
        if "silu" not in block.activations:
            assert torch.equal(y.double(), exact.to(y.device)), str(knobs)
        verdict = judge(executable, ENGINE.family, problem, make_data(problem, 4, "normal", "cuda"), "normal")
        assert verdict.ok, f"[{knobs}]: {verdict.reason}"


@pytest.mark.parametrize("name", ["ResNet-50, first stage", "ResNet-50, second stage"])
def test_a_graph_gives_the_same_bits_in_every_replay_beside_other_work(name, target):
    problem = subgraph_of(BLOCKS[name])
    executable = ENGINE.build(problem, ENGINE.space(problem, target)[0], target)
    buffers = launched(executable, make_data(problem, 4, "normal", "cuda"), BLOCKS[name])
    torch.cuda.synchronize()
    before, graph = buffers.results[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executable.launch(buffers, None)
    side, work = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for _ in range(REPLAYS):
        graph.replay()
        with torch.cuda.stream(side):
            torch.mm(work, work)
    torch.cuda.synchronize()
    assert torch.equal(before, buffers.results[0])


class Block(nn.Module):
    """A bottleneck with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((256, 64, 1), (64, 64, 3), (64, 256, 1))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, k, side, padding=side // 2, bias=False), nn.BatchNorm2d(k))
            for c, k, side in sizes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As in ResNet-50."""
        first, second, last = self.layers
        return (last(second(first(x).relu()).relu()) + x).relu()


def test_a_net_runs_with_it_where_it_is_named(tmp_path: Path, target):
    model, x = Block().eval().half().cuda(), torch.randn(2, 256, 56, 56, device="cuda", dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    settings = convoy.Settings(
        db=tmp_path / "perf.db", only_engines=(ENGINE.id,), layout="nhwc", solver="single", effort="none"
    )
    result = optimize_model(model, (x,), name="block", settings=settings)
    assert [layer.engine for layer in result.summary.layers if layer.engine == ENGINE.id] == [ENGINE.id]
    with torch.no_grad():
        wanted, made = copy.deepcopy(model).double()(x.double()), result.program(x)
    assert (made.double() - wanted).norm() < 5e-3 * wanted.norm()
