"""Layers between permutes become layers of images, and a scale for each channel becomes part of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import convoy
from convoy.capture import capture_inference
from convoy.capture.passes.fold_scale import fold_scale
from convoy.capture.passes.permuted_layers import permuted_layers
from convoy.capture.passes.recognise_layers import recognise_layers
from convoy.engines.interpret import compile_graph
from tests.unit.capture.test_passes import ops, rewritten
from tests.unit.program.fast_net import always_kept

BEFORE = """
input %x: fp32[2,4,5,3]
constant %w: fp32[6,4]
constant %b: fp32[6]
%l: fp32[2,5,3,4] = aten.permute.default(%x, (0, 2, 3, 1))
"""
LINEAR = "%h: fp32[2,5,3,6] = aten.linear.default(%l, %w, %b)\n"
RESPONSE_NORM = (
    "%n: fp32[2,1,1,6] = aten.linalg_vector_norm.default(%h, 1, (1, 2), True)\n"
    "%m: fp32[2,1,1,1] = aten.sum.dim_IntList(%n, (-1,), True)\n"
    "%r: fp32[2,5,3,6] = aten.sub.Tensor(%h, %m)\n"
)
AFTER = "%y: fp32[2,6,5,3] = aten.permute.default(%r, (0, 3, 1, 2))\nreturn %y\n"


def test_a_linear_layer_between_permutes_is_a_convolution():
    text = BEFORE + LINEAR + "%r: fp32[2,5,3,6] = aten.relu.default(%h)\n" + AFTER
    graph, constants = rewritten(text, permuted_layers, recognise_layers)
    assert ops(graph) == ["conv2d", "relu"]
    assert constants["w.filter"].shape == (6, 4, 1, 1)


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ("%r: fp32[2,5,3,6] = aten.mul.Tensor(%h, %s)\n", ["conv2d", "mul.Tensor"]),
        ("%r: fp32[2,5,3,6] = aten.add.Tensor(%h, %h)\n", ["conv2d", "add.Tensor"]),
        ("%r: fp32[2,5,3,6] = aten.clamp.default(%h, 0, 2)\n", ["conv2d", "clamp"]),
        (
            RESPONSE_NORM,
            ["conv2d", "linalg_vector_norm", "sum.dim_IntList", "sub.Tensor"],
        ),
        (
            "%r: fp32[2,5,3,6] = aten.layer_norm.default(%h, (6,), %s, %s, 1e-05, False)\n",
            ["conv2d", "permute", "layer_norm", "permute"],
        ),
    ],
    ids=["scale", "sum", "bounds", "response norm", "layer norm"],
)
def test_what_stands_between_is_computed_with_the_channels_first(more: str, left: list[str]):
    scale = "constant %s: fp32[6]\n" if "%s" in more else ""
    head, permute = BEFORE.strip().rsplit("\n", 1)
    text = f"\n{head}\n{scale}{permute}\n{LINEAR}{more}{AFTER}"
    graph, _ = rewritten(text, permuted_layers, recognise_layers, rtol=1e-6)
    assert ops(graph) == left


@pytest.mark.parametrize(
    "text",
    [
        BEFORE + LINEAR + "%r: fp32[2,5,3,6] = aten.relu.default(%h)\n" + AFTER.replace("return %y", "return %y, %h"),
        BEFORE + LINEAR + "%y: fp32[2,90] = aten.view.default(%h, (2, 90))\nreturn %y\n",
        BEFORE + "%y: fp32[2,4,5,3] = aten.permute.default(%l, (0, 3, 1, 2))\nreturn %y\n",
    ],
    ids=["the value is returned", "another reader", "no layer"],
)
def test_other_readers_keep_their_values(text: str):
    text = text if "%w, %b" in text else text.replace("constant %w: fp32[6,4]\nconstant %b: fp32[6]\n", "")
    graph, _ = rewritten(text, permuted_layers)
    assert "conv2d" not in ops(graph)
    assert "permute" in ops(graph)


CONVOLVED = """
input %x: fp32[2,4,5,3]
constant %w: fp32[6,4,1,1]
constant %b: fp32[6]
constant %s: fp32[{}]
%h: fp32[2,6,5,3] = conv2d(%x, %w, %b, (1, 1), (0, 0), (1, 1), 1)
%y: fp32[2,6,5,3] = aten.mul.Tensor({})
return %y
"""


@pytest.mark.parametrize("shape", ["6,1,1", "1,6,1,1"])
@pytest.mark.parametrize("order", ["%h, %s", "%s, %h"])
def test_a_scale_for_each_channel_goes_into_the_layer(shape: str, order: str):
    graph, _ = rewritten(CONVOLVED.format(shape, order), fold_scale)
    assert ops(graph) == ["conv2d"]


@pytest.mark.parametrize(
    "text",
    [
        CONVOLVED.format("6,5,3", "%h, %s"),
        CONVOLVED.format("1,1,3", "%h, %s"),
        CONVOLVED.format("6,1,1", "%h, %s").replace("return %y", "return %y, %h"),
    ],
    ids=["a value for each element", "a value for each column", "read twice"],
)
def test_other_products_stay(text: str):
    graph, _ = rewritten(text, fold_scale)
    assert ops(graph) == ["conv2d", "mul.Tensor"]


class Block(nn.Module):
    """A ConvNeXt block (Liu et al., 2022)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.widen, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(nn.functional.gelu(self.widen(y))).permute(0, 3, 1, 2)
        return x + self.scale * y


@pytest.fixture(scope="module")
def block() -> Block:
    torch.manual_seed(3)
    return Block(20).eval()


def test_a_convnext_block_is_convolutions_around_a_layer_norm(block: Block):
    x = torch.randn(2, 20, 9, 8)
    captured = capture_inference(block, (x,))
    assert ops(captured.graph) == [
        "conv2d", "permute", "layer_norm", "permute", "conv2d", "gelu", "conv2d", "add.Tensor",
    ]  # fmt: skip
    constants = [tensor.double() for tensor in captured.constants.values()]
    (y,) = compile_graph(captured.graph, double=True)([x.double()], constants)
    block64 = Block(20).double().eval()
    block64.load_state_dict(block.state_dict())
    torch.testing.assert_close(y, block64(x.double()), rtol=1e-6, atol=1e-6)


def test_an_optimized_convnext_block_is_right(block: Block):
    x = torch.randn(2, 20, 9, 8)
    with always_kept():
        found = convoy.optimize(block, (x,), settings=convoy.Settings(effort=convoy.Effort.NONE))
    assert not found.plan.baseline
    with torch.no_grad():
        torch.testing.assert_close(found(x), block(x), rtol=1e-5, atol=1e-5)
        block.scale.mul_(2.0)
        with pytest.warns(UserWarning, match="scale was changed in place"):
            torch.testing.assert_close(found(x), block(x), rtol=1e-5, atol=1e-5)
