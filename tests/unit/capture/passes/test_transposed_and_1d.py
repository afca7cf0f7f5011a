"""Transposed and 1-D convolutions, and linear layers of more than two dimensions: the nodes, and right results by default."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import convoy
from convoy.capture import capture_inference, capture_training
from convoy.capture.passes.one_dimensional import one_dimensional
from convoy.capture.passes.recognise_layers import recognise_layers
from convoy.capture.passes.split_backward import split_backward
from convoy.capture.passes.transposed_convolutions import transposed_convolutions
from convoy.engines.interpret import compile_graph
from tests.unit.capture.test_passes import ops, rewritten
from tests.unit.program.fast_net import always_kept

QUICK = convoy.Settings(effort=convoy.Effort.NONE)


def height(size: int, filter_: int, stride: int, pad: int, extra: int, dilation: int) -> int:
    return (size - 1) * stride - 2 * pad + dilation * (filter_ - 1) + extra + 1


@pytest.mark.parametrize(
    ("stride", "pad", "extra", "groups", "dilation", "side"),
    [
        (1, 0, 0, 1, 1, 3),
        (2, 0, 0, 1, 1, 3),
        (2, 1, 1, 1, 1, 3),
        (2, 0, 0, 2, 1, 4),
        (1, 1, 0, 1, 2, 3),
        (3, 1, 2, 4, 1, 2),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_transposed_convolution_is_a_data_gradient(
    stride: int, pad: int, extra: int, groups: int, dilation: int, side: int, bias: bool
):
    h, w = (height(size, side, stride, pad, extra, dilation) for size in (5, 6))
    c = 8 // groups
    text = f"input %x: fp32[2,4,5,6]\nconstant %w: fp32[4,{c},{side},{side}]\n"
    text += "constant %b: fp32[8]\n" if bias else ""
    args = f"({stride}, {stride}), ({pad}, {pad}), ({extra}, {extra}), {groups}, ({dilation}, {dilation})"
    call = f"aten.conv_transpose2d.input(%x, %w, {'%b' if bias else 'None'}, {args})"
    graph, _ = rewritten(f"{text}%y: fp32[2,8,{h},{w}] = {call}\nreturn %y\n", transposed_convolutions)
    assert ops(graph) == ["conv2d_dgrad", *(["add.Tensor"] if bias else [])]


def test_an_output_padding_that_no_convolution_has_stays():
    text = "input %x: fp32[1,4,5,5]\nconstant %w: fp32[4,3,2,2]\n"
    call = "aten.conv_transpose2d.input(%x, %w, None, (1, 1), (0, 0), (1, 1), 1, (2, 2))"
    graph, _ = rewritten(f"{text}%y: fp32[1,3,8,8] = {call}\nreturn %y\n", transposed_convolutions)
    assert ops(graph) == ["conv_transpose2d.input"]


def test_its_backward_pass_is_a_convolution_and_a_weight_gradient():
    text = (
        "input %dy: fp32[2,6,9,11]\ninput %x: fp32[2,4,4,5]\ninput %w: fp32[4,3,3,3]\n"
        "%dx: fp32[2,4,4,5], %dw: fp32[4,3,3,3], %db: fp32[6] = aten.convolution_backward.default("
        "%dy, %x, %w, (6,), (2, 2), (0, 0), (1, 1), True, (0, 0), 2, (True, True, True))\nreturn %dx, %dw, %db\n"
    )
    graph, _ = rewritten(text, transposed_convolutions)
    assert ops(graph) == ["conv2d", "conv2d_wgrad", "sum.dim_IntList"]


ONE = "input %x: fp32[2,4,9]\nconstant %w: fp32[6,{},3]\nconstant %b: fp32[6]\n"


@pytest.mark.parametrize(
    ("c", "call", "width"),
    [
        (4, "conv1d.default(%x, %w, %b)", 7),
        (4, "conv1d.default(%x, %w, %b, (2,), (1,))", 5),
        (2, "conv1d.default(%x, %w, %b, (1,), (2,), (2,), 2)", 9),
        (4, 'conv1d.padding(%x, %w, %b, (1,), "same")', 9),
        (4, "convolution.default(%x, %w, %b, (2,), (0,), (1,), False, (0,), 1)", 4),
    ],
)
def test_a_1d_convolution_is_one_of_an_image_with_one_row(c: int, call: str, width: int):
    text = f"{ONE.format(c)}%h: fp32[2,6,{width}] = aten.{call}\n%y: fp32[2,6,{width}] = aten.relu.default(%h)\nreturn %y\n"
    graph, _ = rewritten(text, one_dimensional, recognise_layers)
    assert ops(graph) == ["unsqueeze", "conv2d", "relu", "squeeze.dim"]


def test_1d_backward_passes_are_split():
    text = (
        "input %dy: fp32[2,6,5]\ninput %x: fp32[2,4,9]\ninput %w: fp32[6,4,3]\n"
        "%dx: fp32[2,4,9], %dw: fp32[6,4,3], %db: fp32[6] = aten.convolution_backward.default("
        "%dy, %x, %w, (6,), (2,), (1,), (1,), False, (0,), 1, (True, True, True))\nreturn %dx, %dw, %db\n"
    )
    graph, _ = rewritten(text, one_dimensional, split_backward)
    assert {"conv2d_dgrad", "conv2d_wgrad", "sum.dim_IntList"} <= set(ops(graph))
    assert "convolution_backward" not in ops(graph)


def test_a_linear_layer_of_tokens_keeps_its_epilogue():
    text = "input %x: fp32[2,5,8]\nconstant %w: fp32[3,8]\nconstant %b: fp32[3]\n"
    text += "%h: fp32[2,5,3] = aten.linear.default(%x, %w, %b)\n%y: fp32[2,5,3] = aten.gelu.default(%h)\nreturn %y\n"
    graph, _ = rewritten(text, recognise_layers)
    assert ops(graph) == ["linear", "gelu"]
    regions = convoy.regions.propose(graph, layouts=("nchw", "nhwc"), numerics="as_torch")
    assert "linear:n10c8k3:fp32:as_torch:bias+gelu" in {str(p) for region in regions for p in region.problems}


class _Up(nn.Module):
    """A small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ConvTranspose2d(6, 8, 4, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1, groups=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.relu(self.norm(self.first(x))))


class _Sound(nn.Module):
    """A small 1-D net."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 8, 5, stride=2, padding=2), nn.BatchNorm1d(8)
        self.deep = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.up = nn.ConvTranspose1d(8, 5, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm(self.first(x)))
        return self.up(torch.cat([functional.gelu(self.deep(y)) + y, y], 1)[:, :8])


class _Tokens(nn.Module):
    """An attention block's linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.widen, self.narrow = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + functional.scaled_dot_product_attention(q, k, v)
        return x + self.narrow(functional.gelu(self.widen(x)))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "up": (_Up, (2, 6, 5, 7)),
    "sound": (_Sound, (2, 3, 21)),
    "tokens": (_Tokens, (2, 7, 16)),
}


@pytest.mark.parametrize("name", NETS)
def test_an_optimized_net_is_right(name: str):
    torch.manual_seed(4)
    make, shape = NETS[name]
    model, x = make().eval(), torch.randn(shape)
    captured = capture_inference(model, (x,))
    assert not {"conv_transpose2d.input", "conv1d", "linear.default"} & set(ops(captured.graph))
    constants = [tensor.double() for tensor in captured.constants.values()]
    exact = make().double().eval()
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = exact(x.double())
        (found,) = compile_graph(captured.graph, double=True)([x.double()], constants)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        with always_kept():
            fast = convoy.optimize(model, (x,), settings=QUICK)
        assert not fast.plan.baseline
        torch.testing.assert_close(fast(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["up", "sound"])
def test_a_training_step_is_right(name: str):
    torch.manual_seed(5)
    make, shape = NETS[name]
    model, stock, x = make(), make(), torch.randn(shape)
    stock.load_state_dict(model.state_dict())
    y = torch.zeros_like(model(x))
    stock(x)
    graph = capture_training(model, functional.mse_loss, (x, y)).captured.graph
    assert {"conv2d_dgrad", "conv2d_wgrad", "conv2d"} <= set(ops(graph))
    assert not {"convolution", "convolution_backward"} & set(ops(graph))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, stock)]
    with always_kept():
        step = convoy.training_step(model, functional.mse_loss, optimizers[0], (x, y), settings=QUICK)
    assert not step.plan.baseline
    for _ in range(2):
        step(x, y)
        optimizers[1].zero_grad()
        functional.mse_loss(stock(x), y).backward()
        optimizers[1].step()
    for have, want in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
