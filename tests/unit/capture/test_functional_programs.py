"""Exported programs without writes: what is rewritten call by call is the graph that PyTorch's own decomposition makes."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from convoy.capture import Captured, capture_inference, captured_function, functionalize
from convoy.capture.recording.simple_calls import IN_PLACE, KEPT, MAY_SHARE, aten
from convoy.zoo import input_size, load_model

NETS = ["alexnet", "googlenet", "efficientnet_b0"]
NETS += [pytest.param(net, marks=pytest.mark.long) for net in ("mobilenet_v2", "densenet121")]
"""Each call of those marked is one of `OPERATORS` below."""


@pytest.fixture
def both(monkeypatch):
    """The direct capture, the capture by PyTorch's decomposition, and whether calls were rewritten in the former."""

    def capture(model: nn.Module, *args: torch.Tensor) -> tuple[Captured, Captured, bool]:
        simple, answers = functionalize._is_simple, []
        monkeypatch.setattr(functionalize, "_is_simple", lambda program: answers.append(simple(program)) or answers[-1])
        found = capture_inference(model, args)
        monkeypatch.setattr(functionalize, "_is_simple", lambda program: False)
        wanted = capture_inference(model, args)
        monkeypatch.setattr(functionalize, "_is_simple", simple)
        return found, wanted, answers[0]

    return capture


def is_same(found: Captured, wanted: Captured) -> bool:
    constants = found.constants.keys() == wanted.constants.keys()
    constants = constants and all(
        torch.equal(found.constants[name], wanted.constants[name]) for name in found.constants
    )
    return constants and found.graph == wanted.graph and found.notes == wanted.notes


@pytest.mark.parametrize("net", NETS)
def test_nets_are_rewritten_to_the_same_graph(net, both):
    size = input_size(net)
    side = size if isinstance(size, int) else size[-1]
    found, wanted, simple = both(load_model(net), torch.zeros(1, 3, side, side))
    assert simple
    assert is_same(found, wanted)


def described(program):
    """Calls and their results, as far as both programs must agree."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    parts = [value if isinstance(value, (tuple, list)) else (value,) for value in values]
    specs = [[(p.shape, p.stride(), p.dtype, p.device) for p in many if isinstance(p, torch.Tensor)] for many in parts]
    calls = [node.target if node.op == "call_function" else node.op for node in program.graph.nodes]
    return list(zip(calls, specs, strict=True))


@pytest.mark.parametrize("net", [pytest.param("mobilenet_v2", marks=pytest.mark.long), "efficientnet_b0"])
def test_on_a_gpu_that_is_not_there_they_are_the_same_too(net):
    """Shapes, strides, dtypes and devices of what PyTorch takes for tensors on a GPU."""
    model = load_model(net).eval().half()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for module in model.modules():
            for name, value in module.named_parameters(recurse=False):
                module._parameters[name] = nn.Parameter(torch.empty_like(value, device="cuda"), requires_grad=False)
            for name, value in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(value, device="cuda")
        x = torch.empty(2, 3, 224, 224, dtype=torch.half, device="cuda")
        found, wanted = (torch.export.export(model, (x,), strict=False) for _ in range(2))
        assert functionalize._is_simple(found)
        assert described(functionalize.functional(found)) == described(wanted.run_decompositions({}))


class Calls(nn.Module):
    """A convolution, and what a test does with it."""

    def __init__(self, body, dtype=torch.float32):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, dtype=dtype)
        self.linear = nn.Linear(8, 8, dtype=dtype)
        self.norm = nn.BatchNorm2d(4, dtype=dtype)
        self.body = body

    def forward(self, x):
        return self.body(self, self.conv(x), x)


OPERATORS = {
    aten.adaptive_avg_pool2d.default: lambda m, y, x: F.adaptive_avg_pool2d(y, 2),
    aten.add.Tensor: lambda m, y, x: torch.add(y, m.norm(y), alpha=2),
    aten.alias.default: lambda m, y, x: y[:, :4] * 2,
    aten.avg_pool2d.default: lambda m, y, x: F.avg_pool2d(y, 2),
    aten.batch_norm.default: lambda m, y, x: m.norm(y),
    aten.cat.default: lambda m, y, x: torch.cat([y, x], 1),
    aten.conv2d.default: lambda m, y, x: y,
    aten.hardsigmoid.default: lambda m, y, x: F.hardsigmoid(y),
    aten.hardswish.default: lambda m, y, x: F.hardswish(y),
    aten.hardtanh.default: lambda m, y, x: F.hardtanh(y, -0.5, 0.25),
    aten.linear.default: lambda m, y, x: m.linear(y),
    aten.max_pool2d.default: lambda m, y, x: F.max_pool2d(y, 3, 2, 1, ceil_mode=True),
    aten.mean.dim: lambda m, y, x: y.mean((2, 3), keepdim=True),
    aten.mul.Tensor: lambda m, y, x: y * 2.5,
    aten.relu.default: lambda m, y, x: F.relu(y),
    aten.sigmoid.default: lambda m, y, x: torch.sigmoid(y),
    aten.silu.default: lambda m, y, x: F.silu(y),
    aten.add_.Tensor: lambda m, y, x: y.add_(F.relu(y), alpha=3),
    aten.hardsigmoid_.default: lambda m, y, x: F.hardsigmoid(y, inplace=True),
    aten.hardswish_.default: lambda m, y, x: F.hardswish(y, inplace=True),
    aten.hardtanh_.default: lambda m, y, x: F.hardtanh(y, 0.0, 0.5, inplace=True),
    aten.mul_.Tensor: lambda m, y, x: y.mul_(0.5),
    aten.relu_.default: lambda m, y, x: F.relu(y, inplace=True),
    aten.sigmoid_.default: lambda m, y, x: y.sigmoid_(),
    aten.silu_.default: lambda m, y, x: F.silu(y, inplace=True),
    aten.dropout.default: lambda m, y, x: F.dropout(y, 0.5, m.training) + 1,
    aten.dropout_.default: lambda m, y, x: F.dropout(F.relu(y), 0.5, m.training, inplace=True) + 1,
    aten.flatten.using_ints: lambda m, y, x: y.flatten(1, 2),
    aten.adaptive_avg_pool1d.default: lambda m, y, x: F.adaptive_avg_pool1d(y.flatten(2), 3),
    aten.adaptive_avg_pool3d.default: lambda m, y, x: F.adaptive_avg_pool3d(y[:, None], 2),
    aten.addcmul.default: lambda m, y, x: torch.addcmul(y, y, x[:, :1], value=0.5),
    aten.avg_pool1d.default: lambda m, y, x: F.avg_pool1d(y.flatten(2), 3),
    aten.avg_pool3d.default: lambda m, y, x: F.avg_pool3d(y[:, None], 2),
    aten.chunk.default: lambda m, y, x: torch.cat(y.chunk(3, 1)[::-1], 1) + y.chunk(2)[0],
    aten.clamp_min.default: lambda m, y, x: y.clamp_min(0.25),
    aten.contiguous.default: lambda m, y, x: y.contiguous().transpose(1, 2).contiguous() * x[:1, :1, :1],
    aten.conv2d.padding: lambda m, y, x: F.conv2d(y, m.conv.weight[:, :1], padding="same", groups=4),
    aten.expand_as.default: lambda m, y, x: y * y.mean(1, keepdim=True).expand_as(y),
    aten.conv1d.default: lambda m, y, x: F.conv1d(y.flatten(2), m.linear.weight[:, :4, None]),
    aten.conv3d.default: lambda m, y, x: F.conv3d(y[:, None], m.conv.weight[:, None, :1], stride=2),
    aten.div.Tensor: lambda m, y, x: y / 3 / (x.mean((1, 2, 3), keepdim=True) + 2),
    aten.div_.Tensor: lambda m, y, x: y.div_(1.5),
    aten.elu.default: lambda m, y, x: F.elu(y, 0.5),
    aten.elu_.default: lambda m, y, x: F.elu(y, 0.5, inplace=True),
    aten.expand.default: lambda m, y, x: y[:, :1].expand(-1, 3, -1, -1) + x,
    aten.gelu.default: lambda m, y, x: F.gelu(y) + F.gelu(y, approximate="tanh"),
    aten.group_norm.default: lambda m, y, x: F.group_norm(y, 2, m.norm.weight, m.norm.bias),
    aten.layer_norm.default: lambda m, y, x: F.layer_norm(y.permute(0, 2, 3, 1), (4,), m.norm.weight, m.norm.bias),
    aten.leaky_relu.default: lambda m, y, x: F.leaky_relu(y, 0.2),
    aten.leaky_relu_.default: lambda m, y, x: F.leaky_relu(y, 0.2, inplace=True),
    aten.linalg_vector_norm.default: lambda m, y, x: y.norm(p=2, dim=(1, 2), keepdim=True),
    aten.matmul.default: lambda m, y, x: y @ y.transpose(2, 3),
    aten.max_pool1d.default: lambda m, y, x: F.max_pool1d(y.flatten(2), 3, 2, 1),
    aten.max_pool3d.default: lambda m, y, x: F.max_pool3d(y[:, None], 2),
    aten.mish.default: lambda m, y, x: F.mish(y),
    aten.mish_.default: lambda m, y, x: F.mish(y, inplace=True),
    aten.pad.default: lambda m, y, x: F.pad(F.pad(y, (1, 0, 2, 1)), (1, 1, 1, 1), mode="reflect"),
    aten.permute.default: lambda m, y, x: y.permute(0, 2, 3, 1) + 1,
    aten.pixel_shuffle.default: lambda m, y, x: F.pixel_shuffle(y, 2),
    aten.pow.Tensor_Scalar: lambda m, y, x: y**2,
    aten.reshape.default: lambda m, y, x: y.reshape(2, 2, -1).transpose(1, 2).reshape(2, -1) + y.reshape(2, -1),
    aten.reshape_as.default: lambda m, y, x: y.flatten(1).reshape_as(y) + y.transpose(2, 3).reshape_as(y),
    aten.scaled_dot_product_attention.default: lambda m, y, x: F.scaled_dot_product_attention(y, y, y, scale=0.5),
    aten.select.int: lambda m, y, x: y[:, 1] + x[:, 0],
    aten.slice.Tensor: lambda m, y, x: y[:, 1:3, ::2] + y[:, :2, 1:8:2],
    aten.softmax.int: lambda m, y, x: y.softmax(1),
    aten.split.Tensor: lambda m, y, x: torch.cat([*y.split(1, 1)[2:], y.split(3, 1)[0]], 1),
    aten.split_with_sizes.default: lambda m, y, x: y.split([1, 3], 1)[1] + y.split([1, 3], 1)[0],
    aten.squeeze.dim: lambda m, y, x: y.mean(1, keepdim=True).squeeze(1),
    aten.stack.default: lambda m, y, x: torch.stack([y[:, :3], x], 1),
    aten.sub.Tensor: lambda m, y, x: torch.sub(y, x[:, :1], alpha=2),
    aten.sub_.Tensor: lambda m, y, x: y.sub_(F.relu(y), alpha=3),
    aten.sum.dim_IntList: lambda m, y, x: y.sum((1, 2)),
    aten.tanh.default: lambda m, y, x: torch.tanh(y),
    aten.transpose.int: lambda m, y, x: y.transpose(1, 2) * 2,
    aten.unbind.int: lambda m, y, x: y.unbind(1)[1] + y.unbind(0)[1][:2],
    aten.unsqueeze.default: lambda m, y, x: y[:, None] * x[:, :, None],
    aten.upsample_bilinear2d.vec: lambda m, y, x: F.interpolate(y, scale_factor=2, mode="bilinear"),
    aten.upsample_nearest2d.vec: lambda m, y, x: F.interpolate(y, size=(5, 12)),
    aten.view.default: lambda m, y, x: y.view(2, 2, 2, 8, 8) + 1,
    operator.getitem: lambda m, y, x: y.chunk(2, 1)[0],
}


def test_every_operator_that_is_rewritten_has_a_case():
    assert set(OPERATORS) == KEPT | set(IN_PLACE) | MAY_SHARE | {aten.batch_norm.default}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("target", OPERATORS, ids=str)
def test_operators_are_rewritten_to_the_same_graph(target, dtype, both):
    found, wanted, simple = both(Calls(OPERATORS[target], dtype), torch.zeros(2, 3, 8, 8, dtype=dtype))
    assert simple
    assert is_same(found, wanted)


def standardised(m, y, x):
    """A weight as NFNet has it, and the same without a scale."""
    weight = F.batch_norm(
        m.conv.weight.reshape(1, 4, -1), None, None, weight=m.norm.weight, training=True, momentum=0.0
    )
    plain = F.batch_norm(m.conv.weight.reshape(1, 4, -1), None, None, training=True)
    return F.conv2d(x, (weight + plain).reshape_as(m.conv.weight), m.conv.bias)


def reread(m, y, x):
    """Reads what was written by its old name."""
    z = y * 2
    y.relu_()
    y.add_(z)
    return y + z


def two_names(m, y, x):
    """Writes by both names."""
    z = y.relu_()
    y.mul_(3.0)
    z.add_(1.5)
    return y + z, y


def seen_by_a_view(m, y, x):
    flat = y.flatten(1)
    y.relu_()
    return flat.sum(1)


def of_a_view(m, y, x):
    y.flatten(1).relu_()
    return y


def seen_by_a_view_of_another_name(m, y, x):
    flat = y.relu_().flatten(1)
    y.sub_(0.5)
    y.mul_(2.0)
    return flat * 2


def seen_by_a_part(m, y, x):
    first, second = y.chunk(2, 1)
    y.relu_()
    return first - second


def of_a_part(m, y, x):
    y.split(1, 1)[1].relu_()
    return y


def of_a_transposed_view(m, y, x):
    y.permute(0, 2, 3, 1)[..., 0].mul_(2.0)
    return y


def of_a_reshaped_copy(m, y, x):
    z = y.transpose(1, 2).reshape(2, -1)
    z.relu_()
    return z.sum() + y


def before_a_view(m, y, x):
    y.relu_()
    z = y.reshape(2, -1)
    return z[:, :3] * 2, y.permute(0, 2, 3, 1)


def of_a_contiguous_tensor(m, y, x):
    z = y.contiguous()
    z.relu_()
    return y + z.transpose(1, 2).contiguous().relu_().transpose(1, 2)


def behind_dropout(m, y, x):
    kept = F.dropout(y, 0.5, m.training)
    kept.relu_()
    return y


def of_an_argument(m, y, x):
    return y + x.mul_(2.0).mean(1, keepdim=True)


def without_a_scale(m, y, x):
    return F.batch_norm(y, m.norm.running_mean, m.norm.running_var)


def of_another_dtype(m, y, x):
    return y.to(torch.bfloat16).add_(x.mean(1, keepdim=True))


SIMPLE = (reread, two_names, before_a_view, standardised)
VIEWED = (seen_by_a_part, of_a_part, of_a_transposed_view, of_a_reshaped_copy, of_a_contiguous_tensor)
OTHERS = (
    *VIEWED,
    seen_by_a_view,
    of_a_view,
    seen_by_a_view_of_another_name,
    of_an_argument,
    without_a_scale,
    of_another_dtype,
)


@pytest.mark.parametrize("body", [*SIMPLE, *OTHERS], ids=lambda body: body.__name__)
def test_writes_compute_what_pytorch_computes(body, both):
    torch.manual_seed(3)
    model, x = Calls(body).eval(), torch.randn(2, 3, 8, 8)
    found, wanted, simple = both(model, x.clone())
    assert simple == (body in SIMPLE)
    assert is_same(found, wanted)
    with torch.no_grad():
        expected = model(x.clone())
        made = captured_function(found)(x.clone())
    torch.testing.assert_close(made, expected)


def test_what_is_written_behind_dropout_is_left_to_pytorch(both):
    """In evaluation mode dropout returns its operand; PyTorch's decomposition makes a copy of it."""
    _, _, simple = both(Calls(behind_dropout), torch.zeros(2, 3, 8, 8))
    assert not simple


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_statistics_of_a_batch_norm_are_those_of_pytorchs_tracer(device, dtype):
    norm = torch.ops.aten._native_batch_norm_legit_no_training.default
    for parameters in (dtype, torch.float32):
        with FakeTensorMode():
            given = [torch.empty(3, dtype=parameters, device=device) for _ in range(4)]
            made = norm(torch.empty(1, 3, dtype=dtype, device=device), *given, 0.1, 1e-5)[1:]
        by_channel, kind = functionalize._statistics(torch.device(device), dtype)
        assert [(each.numel(), each.dtype) for each in made] == [(3 if by_channel else 0, kind)] * 2
