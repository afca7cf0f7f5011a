"""An engine of the user's own has what the engines here have: slices, native chains, patterns and fusions."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.base import Engine, Executable
from convoy.engines.manifest import load_engine
from convoy.engines.subgraph import parse_subgraph
from convoy.errors import InputError
from convoy.graph.text import parse_graph
from convoy.measurement import detect_target
from convoy.perfdb.row import Measurement, Status
from convoy.pipeline.check import end_to_end
from convoy.pipeline.launch_overhead import INTERPRETED_US, launch_us
from convoy.pipeline.net import capture_net
from convoy.pipeline.optimize import optimize_model
from convoy.pipeline.selection_input import layout_problems, selection_problem
from convoy.problem import EngineConfig, SubgraphProblem
from convoy.regions import fused_regions, propose
from convoy.support import Support
from convoy.target import Target

H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
OWN = "own=own_engine:Own"
SETTINGS = convoy.Settings(engines=(OWN,))


class Pair(Executable):
    """Two linear layers as one product: of x with the product of both weights."""

    def pack(self, constants):
        first, second = constants
        return ((second.double() @ first.double()).float().t().contiguous(),)

    def launch(self, buffers, workspace):
        torch.mm(buffers.args[0], buffers.constants[0], out=buffers.results[0])


class Own(Engine):
    """Linear layers that follow each other, without a bias."""

    id = "own"
    family = "gemm"
    writes_slices = True
    native = True
    fuses_subgraphs = True
    patterns = ("merge",)

    def fusions(self, graph):
        made = {node.outputs[0]: node for node in graph.nodes if node.op == "linear"}
        return [(made[x].name, node.name) for node in made.values() if (x := next(node.refs())) in made]

    def supports(self, problem, target):
        pair = (
            isinstance(problem, SubgraphProblem)
            and [n.op for n in parse_subgraph(problem.text).nodes] == ["linear"] * 2
        )
        return Support.yes() if pair else Support.no("does two linear layers")

    def estimate_us(self, problem, knobs, target):
        return 0.01

    def build(self, problem, knobs, target):
        return Pair()


@pytest.fixture(autouse=True)
def own_module(monkeypatch):
    """`own_engine`, as a user's module that can be imported."""
    module = ModuleType("own_engine")
    module.Own = Own
    monkeypatch.setitem(sys.modules, "own_engine", module)
    yield
    load_engine.cache_clear()


class Branches(nn.Module):
    """Two parallel 1x1 convolutions, as GoogLeNet has them."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(64, 32, 1), nn.Conv2d(64, 64, 1)

    def forward(self, x):
        return torch.cat((self.left(x), self.right(x)), 1)


def merged(settings, target=H100):
    """Regions that merge convolutions."""
    x = torch.randn(1, 64, 4, 4, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    net = capture_net("branches", Branches().half().eval(), (x,), {}, settings, target)
    return [region for region in net.regions if region.pattern == "merge"]


def test_regions_are_proposed_for_the_engines_that_compete():
    usual = convoy.Settings(engines=())
    without = replace(usual, deny_engines=("triton.merged",))
    assert len(merged(usual)) == 1
    assert merged(usual, detect_target("cpu")) == []
    assert merged(without) == []
    assert merged(replace(usual, only_engines=("cudnn",))) == []
    assert len(merged(replace(without, engines=(OWN,)))) == 1  # it names the pattern too


class Chain(nn.Module):
    """A linear layer in two factors."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(24, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x):
        return torch.relu(self.wide(self.narrow(x)))


def test_what_it_fuses_is_chosen_and_right(tmp_path, monkeypatch):
    monkeypatch.setattr(end_to_end, "why_slow", lambda *_: "")  # so small a net is timed by its launches
    model, x = Chain().eval(), torch.randn(3, 24)
    settings = convoy.Settings(isolate=False, engines=(OWN,), db=tmp_path / "perf.db", only_engines=("own",))
    result = optimize_model(model, (x,), settings=settings)
    assert [(s.pattern, s.config.engine) for s in result.plan.steps] == [("fused", "own"), ("op", "aten")]
    assert torch.allclose(result.program(x), model(x), atol=1e-5)
    (path,) = result.program.save(tmp_path / "plan.json")
    loaded = convoy.load(model, path, (x,), settings=replace(settings, only_engines=(), deny_engines=("own",)))
    assert torch.allclose(loaded(x), model(x), atol=1e-5)


def test_its_launches_cost_no_interpreter_time():
    assert launch_us(EngineConfig("own"), "cpu", (OWN,)) == 0
    assert launch_us(EngineConfig("aten"), "cpu", (OWN,)) == INTERPRETED_US


JOINED = parse_graph(
    """graph 1
input %x: fp32[1,8,3,3]
constant %w: fp32[8,8,1,1]
constant %v: fp32[4,8,1,1]
%a: fp32[1,8,3,3] = conv2d(%x, %w, None, (1, 1), (0, 0), (1, 1), 1)
%b: fp32[1,4,3,3] = conv2d(%x, %v, None, (1, 1), (0, 0), (1, 1), 1)
%c: fp32[1,12,3,3] = aten.cat.default((%a, %b), 1)
return %c
"""
)


@pytest.mark.parametrize(("engine", "free"), [("own", True), ("aten", False)])
def test_a_concatenation_of_what_it_writes_may_cost_nothing(engine, free):
    layouts = ("nhwc",)
    regions = propose(JOINED, layouts=layouts, numerics="strict")
    rows = {
        p.key: [Measurement(p.key, EngineConfig(engine), "t", "p", Status.OK, samples=9, median_us=2.0)]
        for region in regions
        for p in region.problems
    }
    made = selection_problem(
        JOINED, regions, layout_problems(JOINED, layouts), rows, layouts=layouts, border={"x": "nhwc", "c": "nhwc"},
        extra_engines=(OWN,),
    )  # fmt: skip
    assert any(candidate.median_us == 0 for candidate in made.candidates) == free


CROSSING = parse_graph(
    """graph 1
input %x: fp32[2,8]
%a: fp32[2,8] = aten.relu.default(%x)
%b: fp32[2,8] = aten.tanh.default(%a)
%c: fp32[2,8] = aten.add.Tensor(%a, %b)
return %c
"""
)


def test_groups_that_are_no_region_are_refused():
    assert [r.id for r in fused_regions(CROSSING, [("b", "a"), ("a", "b")], ("nchw",), "own")] == ["fused(a+b)"]
    for group, words in ((("a",), "two or more"), (("a", "z"), "two or more"), (("a", "c"), "runs through b")):
        with pytest.raises(InputError, match=words):
            fused_regions(CROSSING, [group], ("nchw",), "own")


def test_an_unknown_pattern_is_refused(monkeypatch):
    monkeypatch.setattr(Own, "patterns", ("merges",))
    with pytest.raises(InputError, match="patterns of engine own: got 'merges', expected one of merge, banded"):
        merged(SETTINGS)
