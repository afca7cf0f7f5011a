"""Instance norms become group norms, or batch norms where they use running statistics."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import convoy
from convoy.capture import capture_inference
from convoy.capture.draft import Draft
from convoy.capture.passes.instance_norm import instance_norm
from convoy.engines.cpu.cpu_group_norm import ENGINE as ON_CPU
from convoy.engines.triton.triton_group_norm import ENGINE as ON_GPU
from convoy.graph.text import parse_graph
from convoy.problem import SubgraphProblem
from convoy.regions import fused_regions
from convoy.target import Target
from tests.unit.capture.test_passes import ops, rewritten
from tests.unit.pipeline.untimed import plans_kept

H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
SIDES = {1: (9,), 2: (5, 6), 3: (3, 4, 5)}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("db") / "perf.db")


@pytest.fixture(scope="module", autouse=True)
def kept() -> Iterator[None]:
    """Every right plan is kept: nothing here depends on the clock."""
    with plans_kept():
        yield


def net_of(call: str, dtype: str) -> str:
    """The text of one instance norm."""
    names = [name for name in ("%g", "%b", "%h", "%mean", "%var") if name in call]
    constants = "".join(f"constant {name}: fp32[8]\n" for name in names)
    image = f"{dtype}[2,8,5,6]"
    return f"input %x: {image}\n{constants}%y: {image} = aten.instance_norm.default{call}\nreturn %y\n"


@pytest.mark.parametrize(
    ("call", "op"),
    [
        ("(%x, %g, %b, None, None, True, 0.1, 1e-05, True)", "group_norm"),
        ("(%x, None, None, None, None, True, 0.1, 1e-05, True)", "group_norm"),
        ("(%x, %g, %b, %mean, %var, False, 0.1, 1e-05, True)", "batch_norm"),
        ("(%x, None, None, %mean, %var, False, 0.1, 1e-05, True)", "batch_norm"),
        ("(%x, %h, %h, None, None, True, 0.1, 1e-05, True)", "instance_norm"),
    ],
)
def test_its_statistics_decide_what_it_becomes(call: str, op: str):
    text = net_of(call, "bf16" if "%h" in call else "fp32")
    graph, _ = rewritten(text, instance_norm, rtol=1e-5)
    assert ops(graph) == [op]
    if op.startswith("group"):
        assert graph.nodes[0].args[1] == 8


def test_one_that_changes_running_statistics_stays():
    call = "(%x, None, None, %mean, %var, True, 0.1, 1e-05, True)"
    graph = parse_graph(f"graph 1\n{net_of(call, 'fp32')}")
    draft = Draft.of(graph, {name: torch.ones(8) for name in ("mean", "var")})
    instance_norm(draft)
    assert [node.op for node in draft.nodes] == ["aten.instance_norm.default"]


def norm_net(sides: int, **options: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(sides)
        conv, norm = getattr(nn, f"Conv{sides}d"), getattr(nn, f"InstanceNorm{sides}d")
        net = nn.Sequential(conv(4, 8, 3, padding=1), norm(8, **options), nn.ReLU(), conv(8, 3, 1)).eval()
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            if tensor.is_floating_point() and name.startswith("1."):
                nn.init.uniform_(tensor, 0.5, 1.5)
    return net


def image(sides: int) -> torch.Tensor:
    return torch.randn(2, 4, *SIDES[sides], generator=torch.Generator().manual_seed(5)) + 1.0


@pytest.mark.parametrize("options", [{}, {"affine": True}, {"affine": True, "track_running_stats": True}], ids=str)
@pytest.mark.parametrize("sides", SIDES)
def test_inference_is_right(sides: int, options: dict[str, bool], settings: convoy.Settings):
    net, x = norm_net(sides, **options), image(sides)
    captured = ops(capture_inference(net, (x,)).graph)
    assert "instance_norm" not in captured
    assert ("group_norm" in captured) == ("track_running_stats" not in options)
    expected = copy.deepcopy(net).double()(x.double())
    fast = convoy.optimize(net, (x,), settings=settings)
    assert (fast(x) - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("sides", [2, 3])
def test_the_norm_and_its_activation_are_a_region_of_the_engines_for_group_norms(sides: int):
    graph = capture_inference(norm_net(sides, affine=True), (image(sides),)).graph
    wanted = [names for engine in (ON_CPU, ON_GPU) for names in engine.fusions(graph)]
    assert wanted == [("1", "2")] * 2
    (region,) = fused_regions(graph, wanted[:1], ("nchw", "nhwc"), ON_CPU.id)
    layouts = {problem.layout: problem for problem in region.problems if isinstance(problem, SubgraphProblem)}
    assert ON_GPU.supports(layouts["nhwc" if sides == 2 else "ndhwc"], H100)
    assert "needs layout" in ON_GPU.supports(layouts["nchw" if sides == 2 else "ncdhw"], H100).reason


def test_half_precision_keeps_the_norms_digits(settings: convoy.Settings):
    """Sums in fp32 around the mean: an instance far from zero loses no more than its own rounding."""
    net, x = norm_net(3, affine=True)[1:3].bfloat16(), (image(3).repeat(1, 2, 1, 1, 1) + 4.0).bfloat16()
    expected = copy.deepcopy(net).double()(x.double())
    fast = convoy.optimize(net, (x,), settings=settings)
    assert (fast(x) - expected).norm() < 2.0**-8 * expected.norm()
