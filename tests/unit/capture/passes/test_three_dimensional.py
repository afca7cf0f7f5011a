"""Three-dimensional convolutions: the nodes, their regions, and right results by default."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import convoy
from convoy.capture import capture_inference, capture_training
from convoy.capture.passes.recognise_layers import recognise_layers
from convoy.capture.passes.three_dimensional import three_dimensional
from convoy.engines.interpret import compile_graph
from convoy.problem import Conv3dProblem, ConvProblem
from tests.unit.capture.test_passes import ops, rewritten
from tests.unit.program.fast_net import always_kept

QUICK = convoy.Settings(effort=convoy.Effort.NONE)
HEAD = "input %x: fp32[2,4,5,6,7]\nconstant %w: fp32[6,{},3,3,3]\nconstant %b: fp32[6]\n"


@pytest.mark.parametrize(
    ("c", "call", "shape"),
    [
        (4, "conv3d.default(%x, %w, %b)", "3,4,5"),
        (4, "conv3d.default(%x, %w, %b, (2,), (1,))", "3,3,4"),
        (2, "conv3d.default(%x, %w, None, (1, 2, 1), (1, 0, 2), (2, 1, 1), 2)", "3,2,9"),
        (4, 'conv3d.padding(%x, %w, %b, (1, 1, 1), "same")', "5,6,7"),
        (4, "convolution.default(%x, %w, %b, (2, 2, 2), (0, 0, 0), (1, 1, 1), False, (0, 0, 0), 1)", "2,2,3"),
    ],
)
def test_a_convolution_of_volumes_is_a_layer(c: int, call: str, shape: str):
    text = f"{HEAD.format(c)}%h: fp32[2,6,{shape}] = aten.{call}\n%y: fp32[2,6,{shape}] = aten.relu.default(%h)\nreturn %y\n"
    text = text if "%b" in call else text.replace("constant %b: fp32[6]\n", "")
    graph, _ = rewritten(text, three_dimensional)
    assert ops(graph) == ["conv3d", "relu"]


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        ('conv3d.padding(%x, %w, %b, (1, 1, 1), "same")', "5,6,7"),
        ("conv_transpose3d.input(%x, %v, None, (1, 1, 1), (0, 0, 0), (1, 1, 1), 1, (2, 2, 2))", "8,10,11"),
    ],
)
def test_what_no_problem_describes_stays(call: str, shape: str):
    text = "input %x: fp32[2,4,5,6,7]\nconstant %w: fp32[6,4,2,3,3]\nconstant %b: fp32[6]\n"
    text = text if "%w" in call else "input %x: fp32[2,4,5,6,7]\nconstant %v: fp32[4,6,2,3,3]\n"
    graph, _ = rewritten(f"{text}%y: fp32[2,6,{shape}] = aten.{call}\nreturn %y\n", three_dimensional)
    assert ops(graph) == [call.partition("(")[0]]


def test_backward_passes_are_split():
    text = (
        "input %dy: fp32[2,6,3,3,4]\ninput %x: fp32[2,4,5,6,7]\ninput %w: fp32[6,4,3,3,3]\n"
        "%dx: fp32[2,4,5,6,7], %dw: fp32[6,4,3,3,3], %db: fp32[6] = aten.convolution_backward.default("
        "%dy, %x, %w, (6,), (2, 2, 2), (1, 1, 1), (1, 1, 1), False, (0, 0, 0), 1, (True, True, True))\nreturn %dx, %dw, %db\n"
    )
    graph, _ = rewritten(text, three_dimensional)
    assert ops(graph) == ["conv3d_dgrad", "conv3d_wgrad", "sum.dim_IntList"]
    regions = convoy.regions.propose(graph, layouts=("nchw",), numerics="as_torch")
    assert [len(region.nodes) for region in regions if region.pattern == "wgrad"] == [1, 2]


def test_a_linear_layer_of_volumes_has_no_rows_beside_them():
    text = "input %x: fp32[2,4,5,6,7]\nconstant %w: fp32[4,4,1,1,1]\nconstant %m: fp32[3,7]\n"
    text += "%h: fp32[2,4,5,6,7] = aten.conv3d.default(%x, %w)\n%y: fp32[2,4,5,6,3] = aten.linear.default(%h, %m)\nreturn %y\n"
    graph, _ = rewritten(text, three_dimensional, recognise_layers)
    assert [node.op for node in graph.nodes] == ["conv3d", "aten.linear.default"]
    alone = text.replace("%h: fp32[2,4,5,6,7] = aten.conv3d.default(%x, %w)\n", "").replace("%h", "%x")
    graph, _ = rewritten(alone.replace("constant %w: fp32[4,4,1,1,1]\n", ""), three_dimensional, recognise_layers)
    assert [node.op for node in graph.nodes] == ["linear"]


class _Video(nn.Module):
    """Factorised and dense convolutions, a residual, a pooling, and an upsampling into a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.Conv3d(3, 6, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1), bias=False)
        self.norm = nn.BatchNorm3d(6)
        self.time = nn.Conv3d(6, 8, (3, 1, 1), padding=(1, 0, 0))
        self.dense, self.point = nn.Conv3d(8, 8, 3, padding=1, groups=2), nn.Conv3d(8, 8, 1)
        self.up = nn.ConvTranspose3d(8, 4, 2, stride=2)
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        skip = functional.relu(self.norm(self.space(x)))
        y = functional.relu(self.time(skip))
        y = functional.relu(self.dense(y) + self.point(y))
        y = torch.cat([self.up(functional.max_pool3d(y, 2)), skip], 1)
        return self.head(y.mean((2, 3, 4))), y


X = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def video() -> _Video:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = _Video().eval()
    assert net.norm.running_mean is not None
    net.norm.running_mean.normal_(generator=torch.Generator().manual_seed(3))
    return net


def test_regions_offer_both_formats_and_the_2d_problem():
    captured = capture_inference(video(), (X,))
    assert ops(captured.graph).count("conv3d") == 4
    assert "conv3d_dgrad" in ops(captured.graph)
    regions = convoy.regions.propose(captured.graph, layouts=("nchw", "nhwc"), numerics="as_torch")
    found = {region.id: region.problems for region in regions if region.pattern == "conv"}
    space = found["conv(space+relu)"]
    assert [type(problem) for problem in space] == [Conv3dProblem, Conv3dProblem, ConvProblem]
    assert [problem.layout for problem in space] == ["ncdhw", "ndhwc", "nhwc"]
    assert [problem.layout for problem in found["conv(time)"]] == ["ncdhw", "ndhwc", "nchw", "nhwc"]
    assert [problem.layout for problem in found["conv(dense)"]] == ["ncdhw", "ndhwc"]
    glue = next(region for region in regions if region.pattern == "op" and "cat" in region.id)
    assert [problem.layout for problem in glue.problems] == ["ncdhw", "ndhwc"]


@pytest.mark.parametrize("last", [False, True], ids=["ncdhw", "ndhwc"])
def test_an_optimized_net_is_right_also_from_files(last: bool, tmp_path: Path):
    net = video()
    x = X.contiguous(memory_format=torch.channels_last_3d) if last else X
    exact = video().double()
    with torch.no_grad():
        expected, stock = exact(x.double()), net(x)
        captured = capture_inference(net, (x,))
        constants = [tensor.double() for tensor in captured.constants.values()]
        for have, want in zip(
            compile_graph(captured.graph, double=True)([x.double()], constants), expected, strict=True
        ):
            torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)
        with always_kept():
            fast = convoy.optimize(net, (x,), settings=QUICK)
        assert not fast.plan.baseline
        for have, want, as_stock in zip(fast(x), expected, stock, strict=True):
            torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
            assert have.stride() == as_stock.stride()
        fast.save(tmp_path / "plan.json")
        again = convoy.load(net, tmp_path / "plan.json", (x,))
        assert again.plan.steps == fast.plan.steps
        convoy.export(fast, tmp_path / "net.convoy")
        opened = convoy.open(tmp_path / "net.convoy", trust=True)
        for made in (again(x), opened(x)):
            assert all(torch.equal(have, want) for have, want in zip(made, fast(x), strict=True))
            assert [tensor.stride() for tensor in made] == [tensor.stride() for tensor in stock]


def test_a_training_step_is_right():
    torch.manual_seed(5)
    model, stock = video().train(), video().train()
    y = torch.zeros(2, 5)

    def loss(out: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out[0], y) + out[1].square().mean()

    graph = capture_training(model, loss, (X, y)).captured.graph
    assert {"conv3d_dgrad", "conv3d_wgrad", "conv3d"} <= set(ops(graph))
    assert not {"convolution", "convolution_backward"} & set(ops(graph))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, stock)]
    with always_kept():
        step = convoy.training_step(model, loss, optimizers[0], (X, y), settings=QUICK)
    assert not step.plan.baseline
    for _ in range(2):
        step(X, y)
        optimizers[1].zero_grad()
        loss(stock(X), y).backward()
        optimizers[1].step()
    for have, want in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
