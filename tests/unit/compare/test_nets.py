"""The nets as written down once, over torch's own functions, are torchvision's: same weights, same outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from convoy.compare.frameworks.torch_model import train_without_dropout
from convoy.compare.nets import NETS, transform_input
from convoy.compare.nets.operators import Pad
from convoy.zoo import load_model

SIZES = {"alexnet": 224, "vgg16": 224, "vgg19": 224, "googlenet": 97, "inception_v3": 107}
"""Height and width, pixels, where a net has to have more than 65."""


class TorchOperators:
    def __init__(self, weights: dict[str, torch.Tensor], *, training: bool) -> None:
        self.weights, self.training = weights, training

    def conv(self, x: Any, name: str, stride: int = 1, pad: Pad = 0) -> Any:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return functional.conv2d(x, weight, bias, stride, pad, groups=x.shape[1] // weight.shape[1])

    def batch_norm(self, x: Any, name: str, eps: float) -> Any:
        parts = [self.weights[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return functional.batch_norm(x, *[p.clone() for p in parts[:2]], *parts[2:], training=self.training, eps=eps)

    def relu(self, x: Any) -> Any:
        return x.relu()

    def relu6(self, x: Any) -> Any:
        return functional.relu6(x)

    def silu(self, x: Any) -> Any:
        return functional.silu(x)

    def sigmoid(self, x: Any) -> Any:
        return x.sigmoid()

    def max_pool(self, x: Any, size: int, stride: int, low: int, high: int) -> Any:
        return functional.max_pool2d(functional.pad(x, (low, high, low, high), value=-torch.inf), size, stride)

    def avg_pool(self, x: Any, size: int, stride: int, pad: int = 0) -> Any:
        return functional.avg_pool2d(x, size, stride, pad)

    def mean(self, x: Any, *, keep: bool = False) -> Any:
        return x.mean((2, 3), keepdim=keep)

    def flatten(self, x: Any) -> Any:
        return x.flatten(1)

    def linear(self, x: Any, name: str) -> Any:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def concat(self, xs: Sequence[Any]) -> Any:
        return torch.cat(list(xs), 1)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def multiply(self, x: Any, gate: Any) -> Any:
        return x * gate

    def affine(self, x: Any, scale: Sequence[float], shift: Sequence[float]) -> Any:
        return x * torch.tensor(scale)[:, None, None] + torch.tensor(shift)[:, None, None]

    def height(self, x: Any) -> int:
        return int(x.shape[2])


@pytest.mark.parametrize("name", NETS)
def test_a_net_is_torchvisions(name: str) -> None:
    model = load_model(name, num_classes=11)
    size = SIZES.get(name, 65)
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    for training in (False, True):
        if training:
            train_without_dropout(model)
        with torch.no_grad():
            found = NETS[name](TorchOperators(model.state_dict(), training=training), x)
            wanted = model(x)
        assert found.shape == wanted.shape
        assert (found - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_a_net_with_trained_weights_changes_its_input(name: str) -> None:
    model = load_model(name, num_classes=3)
    x = torch.randn(1, 3, 8, 8)
    model.transform_input = True
    found = transform_input(TorchOperators({}, training=False), x)
    assert torch.allclose(found, model._transform_input(x), atol=1e-6)


@pytest.mark.parametrize(("name", "side", "size"), [("alexnet", "6x6", 288), ("vgg16", "7x7", 32)])
def test_a_net_that_averages_to_another_size_is_refused(name: str, side: str, size: int) -> None:
    model = load_model(name, num_classes=2)
    with pytest.raises(ValueError, match=side):
        NETS[name](TorchOperators(model.state_dict(), training=False), torch.zeros(1, 3, size, size))
