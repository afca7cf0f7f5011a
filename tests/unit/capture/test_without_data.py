"""Calls on tensors without data give the shapes, strides and dtypes that PyTorch gives on a device, or its error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from convoy.capture.copies import separate_copy
from convoy.capture.recording.without_data import result_without_data, tensors_without_data, without_data

aten: Any = torch.ops.aten
X = torch.rand(2, 8, 6, 5)
LAST = X.to(memory_format=torch.channels_last)
HALF = X.to(torch.bfloat16)
ONE, BY_CHANNEL, FLAT = torch.rand(2, 8, 1, 1), torch.rand(8), torch.rand(2, 8)
WEIGHT, WIDE = torch.rand(4, 8, 3, 3), torch.rand(3, 8)

CALLS = [
    *(
        (getattr(aten, name).default, (x,))
        for name in ("relu", "silu", "hardswish", "relu_", "sigmoid_")
        for x in (X, LAST)
    ),
    (aten.hardtanh.default, (HALF, 0.0, 6.0)),
    (aten.relu.default, (torch.ones(3, dtype=torch.int64),)),
    (aten.sigmoid.default, (torch.ones(3, dtype=torch.int64),)),
    (aten.add.Tensor, (X, X)),
    (aten.add.Tensor, (X, LAST)),
    (aten.add.Tensor, (LAST, 1.0)),
    (aten.add.Tensor, (X, HALF)),
    (aten.add.Tensor, (torch.ones(3, dtype=torch.int64), 1.5)),
    (aten.mul.Tensor, (LAST, ONE)),
    (aten.mul.Tensor, (ONE, X)),
    (aten.mul.Tensor, (torch.rand(2, 1, 6, 5), ONE)),
    (aten.mul.Tensor, (X, torch.rand(5))),
    (aten.mul_.Tensor, (X, ONE)),
    (aten.batch_norm.default, (LAST, *[BY_CHANNEL] * 4, False, 0.1, 1e-5, True)),
    (aten.batch_norm.default, (HALF, *[BY_CHANNEL] * 4, False, 0.1, 1e-5, True)),
    (aten.cat.default, ([X, X[:, :3]], 1)),
    (aten.cat.default, ([LAST, LAST, LAST], -3)),
    (aten.cat.default, ([X, LAST], 1)),
    (aten.cat.default, ([FLAT, FLAT],)),
    (aten.cat.default, ([X, HALF], 1)),
    (aten.conv2d.default, (X, WEIGHT)),
    (aten.conv2d.default, (LAST, WEIGHT, BY_CHANNEL[:4], [2, 1], [1, 0], [1, 2])),
    (aten.conv2d.default, (X, WEIGHT.to(memory_format=torch.channels_last), None, [1], [1])),
    (aten.conv2d.default, (X, torch.rand(16, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 8)),
    (aten.linear.default, (FLAT, WIDE, torch.rand(3))),
    (aten.linear.default, (torch.rand(2, 5, 8), WIDE)),
    (aten.linear.default, (BY_CHANNEL, WIDE)),
    (aten.adaptive_avg_pool2d.default, (X, [3, 2])),
    (aten.adaptive_avg_pool2d.default, (LAST, [3, 2])),
    (aten.max_pool2d.default, (LAST, [3, 3], [2, 2], [1, 1], [1, 1], True)),
    (aten.avg_pool2d.default, (X, [2, 2])),
    (aten.mean.dim, (X, [2, 3])),
    (aten.mean.dim, (X, [-1, 2], True)),
    (aten.flatten.using_ints, (X, 1)),
]


def twins(value: Any) -> Any:
    return [twins(each) for each in value] if isinstance(value, (list, tuple)) else without_data(value)


@pytest.mark.parametrize("index", range(len(CALLS)), ids=lambda index: f"{index}-{CALLS[index][0]}")
def test_results_are_like_those_on_a_device(index: int) -> None:
    func, args = CALLS[index]
    wanted = func(*[arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args])
    found = result_without_data(func, tuple(twins(args)), {})
    assert found.is_meta
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.stride() == wanted.stride()


FAULTS = [
    (aten.conv2d.default, (X, torch.rand(4, 7, 3, 3))),
    (aten.conv2d.default, (X, torch.rand(4, 8, 9, 9))),
    (aten.linear.default, (FLAT, torch.rand(3, 7))),
    (aten.add.Tensor, (X, torch.rand(2, 7, 6, 5))),
    (aten.add_.Tensor, (ONE, X)),
    (aten.cat.default, ([X, X[:, :, :5]], 1)),
    (aten.mean.dim, (X, [4])),
]


@pytest.mark.parametrize("index", range(len(FAULTS)), ids=lambda index: f"{index}-{FAULTS[index][0]}")
def test_what_pytorch_refuses_is_refused(index: int) -> None:
    func, args = FAULTS[index]
    with pytest.raises((RuntimeError, IndexError)):
        func(*args)
    with pytest.raises((RuntimeError, IndexError)):
        result_without_data(func, tuple(twins(args)), {})


def test_a_write_returns_its_operand() -> None:
    x = without_data(X)
    assert result_without_data(aten.relu_.default, (x,), {}) is x
    assert result_without_data(aten.add_.Tensor, (x, without_data(ONE)), {}) is x


def test_a_shared_parameter_stays_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(requires_grad=False)
    twin = separate_copy(model, tensors=tensors_without_data(model))
    assert twin[1].weight is twin[0].weight
    assert all(tensor.is_meta for tensor in twin.state_dict().values())
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert not twin[0].bias.requires_grad
    assert twin[1].bias.requires_grad
