"""undecomposed: training graphs have PyTorch's own operators where its tracer would put many in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate, mish, silu

from convoy.capture import capture_training, to_double
from convoy.capture.recording import undecomposed as module
from convoy.capture.recording.undecomposed import GRADIENTS, RESIZERS, undecomposed
from convoy.engines.interpret import compile_graph

Resize = Callable[[torch.Tensor], torch.Tensor]

LAYERS: dict[str, tuple[int, Resize, str]] = {
    "nearest-1d": (1, lambda x: interpolate(x, scale_factor=2), "upsample_nearest1d"),
    "nearest-2d": (2, lambda x: interpolate(x, scale_factor=2), "upsample_nearest2d"),
    "nearest-2d-size": (2, lambda x: interpolate(x, size=(7, 9)), "upsample_nearest2d"),
    "nearest-3d": (3, lambda x: interpolate(x, scale_factor=2), "upsample_nearest3d"),
    "exact-1d": (1, lambda x: interpolate(x, size=9, mode="nearest-exact"), "_upsample_nearest_exact1d"),
    "exact-2d": (2, lambda x: interpolate(x, size=(7, 9), mode="nearest-exact"), "_upsample_nearest_exact2d"),
    "exact-3d": (3, lambda x: interpolate(x, size=(7, 9, 3), mode="nearest-exact"), "_upsample_nearest_exact3d"),
    "linear": (1, lambda x: interpolate(x, scale_factor=1.5, mode="linear"), "upsample_linear1d"),
    "bilinear": (2, lambda x: interpolate(x, size=(9, 3), mode="bilinear"), "upsample_bilinear2d"),
    "bilinear-corners": (
        2, lambda x: interpolate(x, scale_factor=(2, 3), mode="bilinear", align_corners=True), "upsample_bilinear2d"
    ),
    "trilinear": (3, lambda x: interpolate(x, scale_factor=2, mode="trilinear"), "upsample_trilinear3d"),
    "bicubic": (2, lambda x: interpolate(x, scale_factor=2, mode="bicubic"), "upsample_bicubic2d"),
    "bilinear-aa": (2, lambda x: interpolate(x, size=(3, 2), mode="bilinear", antialias=True), "_upsample_bilinear2d_aa"),
    "bicubic-aa": (2, lambda x: interpolate(x, size=(3, 2), mode="bicubic", antialias=True), "_upsample_bicubic2d_aa"),
    "silu": (2, silu, "silu"),
    "silu-in-place": (2, lambda x: silu(x, inplace=True), "silu"),
    "mish": (2, mish, "mish"),
}  # fmt: skip
"""Name → dimensions of an image, a layer, and PyTorch's operator of it."""


class Layered(nn.Module):
    def __init__(self, dimensions: int, layer: Resize) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1](2, 4, 3, padding=1)
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.conv(x))


def squared(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum()


FORMATS = [(name, torch.contiguous_format) for name in LAYERS]
FORMATS += [(name, torch.channels_last) for name, (dimensions, *_) in LAYERS.items() if dimensions == 2]


@pytest.mark.parametrize(("name", "memory_format"), FORMATS)
def test_a_step_has_the_operator_and_its_gradient(name: str, memory_format: torch.memory_format) -> None:
    dimensions, layer, operator = LAYERS[name]
    model, x = Layered(dimensions, layer), torch.randn(2, 2, *[6, 4, 5][:dimensions])
    x = x.contiguous(memory_format=memory_format)
    capture = capture_training(model, squared, (x,))
    made = [node.op for node in capture.captured.graph.nodes]
    assert made.count(f"aten.{operator}.default") == 1
    assert made.count(f"aten.{operator}_backward.default") == 1
    assert not any("index" in op or "fill" in op for op in made)
    exact = model.double()
    squared(exact(x.double())).backward()
    double = to_double(capture.captured)
    constants = [double.constants[value.name] for value in double.graph.constants()]
    parameters = dict(exact.named_parameters())
    given = [*(parameters[name].detach() for name in capture.parameters), x.double()]
    _, *gradients = compile_graph(double.graph, double=True)(given, constants)
    assert capture.learned == ("conv.weight", "conv.bias")
    for gradient, wanted in zip(gradients, (exact.conv.weight.grad, exact.conv.bias.grad), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)


def tables() -> dict[object, dict[object, object]]:
    resizers, gradients = module._operators()
    assert len(resizers) == 2 * len(RESIZERS)
    assert len(gradients) == len(GRADIENTS)
    return {operator: dict(operator.py_kernels) for operator in (*resizers, *gradients)}


def failing(inside: list[object]) -> None:
    with undecomposed():
        inside.append(tables())
        with undecomposed():
            pass
        inside.append(tables())
        raise KeyError


def test_tables_are_restored_when_the_last_has_left() -> None:
    before, inside = tables(), list[object]()
    with pytest.raises(KeyError):
        failing(inside)
    first, again = inside
    assert first == again != before
    assert tables() == before


def test_threads_may_overlap() -> None:
    before = tables()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with undecomposed():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    with undecomposed():
        thread.start()
        assert entered.wait(60)
    assert tables() != before
    leave.set()
    thread.join()
    assert tables() == before


def test_runs_on_tensors_are_the_same_inside() -> None:
    x = torch.randn(1, 2, 4, 4, requires_grad=True)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(silu(interpolate(x, scale_factor=2, mode="bilinear")).sum(), x)[0]

    outside = gradient()
    with undecomposed():
        assert torch.equal(gradient(), outside)
