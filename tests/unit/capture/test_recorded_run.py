"""recorded_run: a run's record is the exporter's graph, or there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from convoy.capture import capture_with_original, captured_function
from convoy.capture.recording.recorded_run import recorded
from tests.unit.capture.test_functional_programs import OPERATORS, Calls

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Layers of all kinds that a record may hold, with writes, a branch and an input that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.act, self.pool = nn.Hardswish(inplace=True), nn.AdaptiveAvgPool2d(1)
        self.drop, self.head = nn.Dropout(), nn.Linear(19, 5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        y = F.max_pool2d(self.first(x), 2)
        y = self.act(self.left(y)) + F.silu(self.right(y))
        y *= torch.sigmoid(y.mean((2, 3), keepdim=True))
        z = torch.cat(
            [y, y.relu(), F.avg_pool2d(x, 2)[:, :3, :5, :5] if scale > 1 else F.adaptive_avg_pool2d(x, y.shape[2:])], 1
        )
        flat = torch.flatten(self.pool(z), 1)
        return {"logits": self.head(self.drop(flat)), "features": y}


def test_a_record_is_the_graph_that_the_exporter_traces() -> None:
    model = Net().eval()
    found, found_original = capture_with_original(model, (X,), run=True)
    wanted, wanted_original = capture_with_original(model, (X,))
    assert (found.was_run, wanted.was_run) == (True, False)
    assert found.graph == wanted.graph
    assert found_original.graph == wanted_original.graph
    assert found.strides == wanted.strides
    assert list(found.constants) == list(wanted.constants)
    for name, tensor in wanted.constants.items():
        torch.testing.assert_close(found.constants[name], tensor, rtol=0, atol=0)
    assert found.results.spec == wanted.results.spec
    assert found.arguments.spec == wanted.arguments.spec
    weight = dict(model.named_parameters())["left.weight"]
    assert found_original.constants["left.weight"].data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("target", OPERATORS, ids=str)
def test_a_record_of_each_operator_is_the_graph_of_the_exporter(
    target: torch._ops.OpOverload, memory_format: torch.memory_format
) -> None:
    model = Calls(OPERATORS[target]).eval()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=memory_format)
    try:
        model(x)
    except RuntimeError:  # strides in which this view is none
        x = x.contiguous()
    found, found_original = capture_with_original(model, (x,), run=True)
    wanted, wanted_original = capture_with_original(model, (x,))
    assert found.was_run
    assert found.graph == wanted.graph
    assert found_original.graph == wanted_original.graph
    torch.testing.assert_close(captured_function(found)(x), model(x))


class Attention(nn.Module):
    """Tokens of an image attend to each other, as in timm's mobile nets."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width)
        return self.head(x)


def test_attention_is_recorded_with_the_strides_of_its_kernel() -> None:
    model = Attention().eval()
    found, found_original = capture_with_original(model, (X,), run=True)
    wanted, wanted_original = capture_with_original(model, (X,))
    assert found.was_run
    assert found.graph == wanted.graph
    assert found_original.graph == wanted_original.graph


class _Forward(nn.Module):
    """A layer, and one of the functions below."""

    def __init__(self, then: object) -> None:
        super().__init__()
        self.layer, self.then = nn.Conv2d(3, 4, 3), then
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.kept = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self, self.layer(x), x)  # type: ignore[operator]


def _counts(model: _Forward, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    model.count += 1
    return y


def _keeps(model: _Forward, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    model.kept = y
    return y


def _writes_buffer(model: _Forward, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return y


def _hides_error(model: _Forward, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.cumsum(y, 1)
    except Exception:
        return y


def _autocast(model: _Forward, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.layer(x)


REFUSED = {
    "branches on a value": lambda _, y, x: y if float(y.detach().sum()) > 0 else -y,
    "branches on a list of values": lambda _, y, x: y if x.tolist() else x,
    "reads values by NumPy": lambda _, y, x: y if x.numpy().sum() > 1e9 else y.relu(),
    "draws random numbers": lambda _, y, x: y + torch.rand(()),
    "drops in evaluation mode": lambda _, y, x: F.dropout(y, training=True),
    "writes an argument": lambda _, y, x: y + x.mul_(2).mean((1, 2, 3), keepdim=True),
    "writes a view of an argument": lambda _, y, x: y + torch.flatten(x).mul_(2).mean((0,), keepdim=True),
    "writes a parameter": lambda model, y, x: y + model.layer.bias.data.mul_(2).mean((0,), keepdim=True),
    "reads a tensor from elsewhere": lambda _, y, x: y + X.mean((0, 1, 2, 3), keepdim=True),
    "turns gradients on": lambda model, y, x: torch.enable_grad()(model.layer)(x),
    "counts calls": _counts,
    "keeps a tensor": _keeps,
    "writes a buffer": _writes_buffer,
    "hides the refusal": _hides_error,
    "runs in autocast": _autocast,
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_runs_leave_no_record_and_no_trace(what: str) -> None:
    model, x = _Forward(REFUSED[what]).eval(), X.clone()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert recorded(model, (x,), {}) is None
    assert torch.equal(x, X)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert (model.count, model.kept) == (0, None)


def test_the_same_layer_without_any_of_that_is_recorded() -> None:
    assert recorded(_Forward(lambda _, y, x: y.relu()).eval(), (X,), {}) is not None


def _asks(model: _Forward, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.relu() if next(model.parameters()).device.type == "cpu" and not x.is_cuda else y.sigmoid()


def _asks_and_hides(model: _Forward, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    try:
        return y.relu() if x.device.type == "cpu" else y.sigmoid()
    except Exception:
        return y.sigmoid()


RUNS = {
    "returns no images": (lambda _, y, x: torch.flatten(y.relu(), 1), ["meta"]),
    "returns images, whose strides depend on the device": (lambda _, y, x: y.relu(), ["meta", "cpu"]),
    "asks for the device": (lambda model, y, x: torch.flatten(_asks(model, y, x), 1), ["meta", "cpu"]),
    "asks, and hides the refusal": (
        lambda model, y, x: torch.flatten(_asks_and_hides(model, y, x), 1),
        ["meta", "cpu"],
    ),
    "does what no record shows": (lambda _, y, x: torch.cumsum(y, 1), ["meta"]),
}


@pytest.mark.parametrize("what", RUNS)
def test_only_what_depends_on_the_device_is_run_there(what: str) -> None:
    then, devices = RUNS[what]
    seen: list[torch.Tensor] = []

    def run(model: _Forward, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return then(model, y, x)

    model = _Forward(run).eval()
    program = recorded(model, (X,), {})
    assert [x.device.type for x in seen] == devices
    assert all(not parameter.is_meta for parameter in model.parameters())
    if program is None:
        assert what == "does what no record shows"
    else:
        called = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert torch.ops.aten.relu.default in called
        assert torch.ops.aten.sigmoid.default not in called
        assert program.state_dict["layer.weight"] is model.layer.weight


def test_a_parameter_of_two_layers_is_one_in_a_run_without_data() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.Flatten())
    model[2].weight = model[0].weight
    found, wanted = (capture_with_original(model, (X,), run=run)[0] for run in (True, False))
    assert found.was_run
    assert found.graph == wanted.graph
    assert found.strides == wanted.strides


def test_arguments_that_are_nested_or_named_leave_no_record() -> None:
    model = _Forward(lambda _, y, x: y)
    assert recorded(model, ([X],), {}) is None
    assert recorded(model, (), {"x": X}) is None
    assert recorded(model, (X, X), {}) is None


def test_a_layer_with_two_names_leaves_no_record() -> None:
    layer = nn.Conv2d(3, 3, 1)
    assert recorded(nn.Sequential(layer, nn.ReLU(), layer), (X,), {}) is None


def test_training_flags_and_hooks_are_put_back() -> None:
    model = Net()
    assert recorded(model, (X,), {}) is not None
    assert all(module.training and not module._forward_hooks for module in model.modules())
