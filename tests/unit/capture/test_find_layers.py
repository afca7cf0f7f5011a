"""find_modules: the layers of a model that cannot be captured whole, each with what it was called with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from convoy.capture import capture_inference, captured_function, find_modules
from convoy.errors import CaptureError


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
        self.twice = nn.Conv2d(4, 4, 3)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if x.sum() > -1e9:
            x = self.twice(self.twice(x))
        return self.head(x.mean((2, 3)))


def test_layers_come_in_call_order_with_their_arguments():
    model = Branching().train()
    x = torch.randn(2, 3, 9, 9)
    with pytest.raises(CaptureError):
        capture_inference(model, (x,))
    found = find_modules(model, (x,))
    assert [(name, module, tuple(args[0].shape)) for name, module, args in found] == [
        ("stem.0", model.stem[0], (2, 3, 9, 9)),
        ("head", model.head, (2, 4)),
    ]  # `twice` is called with two shapes, `unused` never
    assert torch.equal(found[0][2][0], x)
    assert not found[1][2][0].requires_grad


def test_each_layer_can_be_captured_by_itself():
    for _, module, args in find_modules(Branching(), (torch.randn(2, 3, 9, 9),)):
        torch.testing.assert_close(captured_function(capture_inference(module, args))(*args), module(*args).detach())


def test_the_model_is_left_as_it_was():
    model = Branching().train()
    model.stem[1].eval()
    flags = [module.training for module in model.modules()]
    mean = model.stem[1].running_mean.clone()
    find_modules(model, (), {"x": torch.randn(2, 3, 9, 9)})
    with pytest.raises(RuntimeError):
        find_modules(model, (torch.randn(2, 5, 9, 9),))
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(model.stem[1].running_mean, mean)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_is_a_layer_has_none_inside():
    assert find_modules(nn.Conv2d(3, 4, 3), (torch.randn(1, 3, 8, 8),)) == []
