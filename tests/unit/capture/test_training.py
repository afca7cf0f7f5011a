"""capture_training: the graph of a step computes what autograd computes, and names what it cannot hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy.capture import TrainingCapture, capture_training, to_double
from convoy.capture.unrolled_recurrence import RecurrenceGuard
from convoy.engines.interpret import compile_graph
from convoy.errors import CaptureError, InputError
from convoy.zoo import load_model


class Small(nn.Module):
    """A branch, a shortcut, a depthwise and a strided convolution, two biases, a pooling."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        x = torch.max_pool2d(self.wide(x) + x, 2)
        return self.fc(self.drop(torch.relu(self.down(x)).mean((2, 3))))


def batch(n: int = 4, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 3, size, size, generator=generator), torch.arange(n) % 5


def inputs_of(capture: TrainingCapture, model: nn.Module, given: tuple[Any, ...]) -> list[torch.Tensor]:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return [*(parameters[n].detach() for n in capture.parameters), *(buffers[n] for n in capture.buffers), *given]


def stock(model: nn.Module, loss_fn: Any, given: tuple[Any, ...]) -> tuple[torch.Tensor, dict, dict]:
    """Loss, gradients and buffers after one step of autograd, on a copy."""
    model = copy.deepcopy(model)
    x, *targets = given
    loss = loss_fn(model(*x) if isinstance(x, tuple) else model(x), *targets)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())


def compare(model: nn.Module, loss_fn: Any, given: tuple[Any, ...], limit: float = 1e-10) -> TrainingCapture:
    """The graph in float64 against autograd in float64."""
    exact = copy.deepcopy(model).double()
    wide = tuple(t.double() if t.is_floating_point() else t for t in given)
    capture = capture_training(model, loss_fn, given)
    run = compile_graph(to_double(capture.captured).graph, double=True)
    constants = [t.double() if t.is_floating_point() else t for t in capture.captured.constants.values()]
    with torch.no_grad():
        loss, *rest = run(inputs_of(capture, exact, wide), constants)
    wanted, gradients, buffers = stock(exact, loss_fn, wide)
    assert torch.allclose(loss, wanted, rtol=limit)
    for name, found in zip(capture.learned, rest, strict=False):
        assert torch.allclose(found, gradients[name], rtol=limit, atol=limit), name
    updates = rest[len(capture.learned) :]
    assert len(updates) == len(capture.updated)
    for name, found in zip(capture.updated, updates, strict=True):
        assert torch.allclose(found, buffers[name], rtol=limit), name
    return capture


def test_a_step_is_that_of_autograd():
    capture = compare(Small(), cross_entropy, batch())
    ops = [node.op for node in capture.captured.graph.nodes]
    assert [ops.count(op) for op in ("conv2d", "conv2d_dgrad", "conv2d_wgrad")] == [3, 2, 3]
    assert {"stem.wgrad", "wide.dgrad", "down.bgrad"} <= capture.captured.graph.values.keys()
    assert capture.counted == ("bn.num_batches_tracked",)
    assert not capture.random


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["alexnet", "resnet18", pytest.param("googlenet", marks=pytest.mark.long), "timm:efficientnet_b0"]
)
def test_nets_of_the_zoo(name: str):
    model = load_model(name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    compare(model, cross_entropy, (torch.randn(2, 3, 64, 64), torch.tensor([1, 2])), 1e-6)


def test_channels_last_gives_the_same_graph():
    plain = capture_training(Small(), cross_entropy, batch())
    model = Small().to(memory_format=torch.channels_last)
    x, y = batch()
    found = compare(model, cross_entropy, (x.contiguous(memory_format=torch.channels_last), y))
    assert len(found.captured.graph.nodes) == len(plain.captured.graph.nodes)
    pooled = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(
        memory_format=torch.channels_last
    )
    compare(pooled, cross_entropy, (x.contiguous(memory_format=torch.channels_last), y))


def test_tracing_computes_nothing() -> None:
    """The activations of this batch would take a petabyte: a run on real tensors fails."""
    images = torch.zeros(1, 3, 32, 32).expand(1 << 30, 3, 32, 32)
    model = nn.Sequential(nn.Conv2d(3, 256, 3, padding=1), nn.BatchNorm2d(256), nn.ReLU())
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    before = {name: (id(tensor), tensor.clone()) for name, tensor in held.items()}
    capture = capture_training(model, lambda y: y.mean(), (images,))
    assert capture.captured.graph.values[capture.captured.graph.inputs[-1]].spec.shape == tuple(images.shape)
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(id(after[name]) == key and torch.equal(after[name], old) for name, (key, old) in before.items())


def test_what_does_not_learn_has_no_gradient_and_what_is_in_evaluation_mode_is_not_updated():
    model = Small()
    model.stem.weight.requires_grad_(False)
    model.bn.eval()
    capture = compare(model, cross_entropy, batch())
    assert "stem.weight" not in capture.learned
    assert "stem.bias" in capture.learned
    assert (capture.updated, capture.counted) == ((), ())


def test_gradients_of_transposed_and_one_dimensional_convolutions_are_layers():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.line = nn.ConvTranspose2d(3, 4, 3, stride=2), nn.Conv1d(4, 5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(self.up(x).flatten(2)).mean(2)

    capture = compare(Odd(), cross_entropy, batch())
    ops = [n.op for n in capture.captured.graph.nodes]
    assert "aten.convolution_backward.default" not in ops
    assert ops.count("conv2d_wgrad") == ops.count("conv2d_dgrad") == 2


def test_autocast_casts_inside_and_gradients_have_the_parameters_dtype():
    capture = capture_training(Small(), cross_entropy, batch(), amp=torch.bfloat16)
    graph = capture.captured.graph
    assert graph.values["stem"].spec.dtype == "bf16"
    gradients = [graph.values[name].spec.dtype for name in graph.outputs[1 : 1 + len(capture.learned)]]
    assert set(gradients) == {"fp32"}


def test_a_scaled_loss_scales_the_gradients_and_not_the_loss_that_is_reported():
    model, given = Small(), batch()
    capture = capture_training(model, cross_entropy, (*given, torch.tensor(8.0)), scaled=True)
    run = compile_graph(capture.captured.graph)
    held = list(capture.captured.constants.values())
    with torch.no_grad():
        loss, *gradients = run(inputs_of(capture, model, (*given, torch.tensor(8.0))), held)
    wanted, stock_gradients, _ = stock(model, cross_entropy, given)
    assert torch.allclose(loss, wanted)
    assert torch.allclose(gradients[0], 8 * stock_gradients[capture.learned[0]], rtol=1e-4, atol=1e-5)


def test_dropout_is_told_of():
    assert capture_training(Small(0.5), cross_entropy, batch()).random


def test_the_model_is_left_as_it_was():
    model = Small()
    before = copy.deepcopy(model.state_dict())
    capture_training(model, cross_entropy, batch())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


class Branches(nn.Module):
    """Its way depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if x.sum() > 0 else -self.fc(x)


@pytest.mark.parametrize(
    ("model", "loss_fn", "words"),
    [
        (Branches(), cross_entropy, "cannot be traced"),
        (nn.Linear(3, 5), lambda y, t: y.detach().sum(), "cannot be traced"),
    ],
)
def test_what_cannot_be_captured_is_said(model: nn.Module, loss_fn: Any, words: str):
    with pytest.raises(CaptureError, match=words):
        capture_training(model, loss_fn, (torch.randn(4, 3), torch.arange(4)))


class Recurrent(nn.Module):
    """Images as sequences of rows, through a recurrent layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(3, 4, 3, padding=1), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.conv(x).mean(3).transpose(1, 2)
        if not self.layer.batch_first:
            rows = rows.transpose(0, 1)
        return self.layer(rows)[0].flatten(0, 1)


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.LSTM(4, 5, batch_first=True), "the LSTM runs 36 time steps"),
        (nn.GRU(4, 5), "the GRU runs 36 time steps"),
        (nn.RNN(4, 5, num_layers=2, bidirectional=True), "the RNN runs 144 time steps"),
        (nn.RNN(4, 5, nonlinearity="relu"), "the RNN runs 36 time steps"),
    ],
)
def test_a_recurrent_layer_of_many_time_steps_is_refused_at_once(layer: nn.RNNBase, words: str):
    """Tracing it takes half a second for each time step, and compiling minutes."""
    with pytest.raises(CaptureError, match=words):
        capture_training(Recurrent(layer), mean_square, (torch.randn(2, 3, 36, 5),))


@pytest.mark.parametrize("layer", [nn.LSTM(4, 5), nn.GRU(4, 5, num_layers=2)])
def test_time_steps_of_packed_sequences_are_counted(layer: nn.RNNBase):
    packed = nn.utils.rnn.pack_sequence([torch.randn(33, 4), torch.randn(7, 4)])
    with RecurrenceGuard(), pytest.raises(CaptureError, match=f"runs {33 * layer.num_layers} time steps"):
        layer(packed)


def test_a_recurrent_layer_of_few_time_steps_is_captured():
    model = Recurrent(nn.LSTM(4, 5, batch_first=True))
    capture = capture_training(model, mean_square, (torch.randn(2, 3, 4, 5),))
    assert {"layer.weight_ih_l0", "layer.weight_hh_l0", "conv.weight"} <= set(capture.learned)


@pytest.mark.parametrize("loss_fn", [lambda y, t: y, lambda y, t: 1.0])
def test_a_loss_that_is_not_one_number_is_named(loss_fn: Any):
    with pytest.raises(InputError, match=r"loss_fn: .*expected one number"):
        capture_training(nn.Linear(3, 5), loss_fn, (torch.randn(4, 3), torch.arange(4)))


def test_a_parameter_without_a_part_in_the_loss_has_no_gradient():
    model = nn.ModuleDict({"used": nn.Linear(3, 5), "idle": nn.Linear(3, 5)})
    model.forward = model["used"].forward
    capture = capture_training(model, cross_entropy, (torch.randn(4, 3), torch.arange(4)))
    assert capture.learned == ("used.weight", "used.bias")
