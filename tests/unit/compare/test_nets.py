"""The nets as written down once, over torch's own functions, are torchvision's: same weights, same outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from convoy.compare.nets import NETS, transform_input
from convoy.zoo import load_model


class TorchOperators:
    def __init__(self, weights: dict[str, torch.Tensor], *, training: bool) -> None:
        self.weights, self.training = weights, training

    def conv(self, x: Any, name: str, stride: int = 1, pad: int = 0) -> Any:
        return functional.conv2d(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"), stride, pad)

    def batch_norm(self, x: Any, name: str, eps: float) -> Any:
        parts = [self.weights[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return functional.batch_norm(x, *[p.clone() for p in parts[:2]], *parts[2:], training=self.training, eps=eps)

    def relu(self, x: Any) -> Any:
        return x.relu()

    def max_pool(self, x: Any, size: int, stride: int, low: int, high: int) -> Any:
        return functional.max_pool2d(functional.pad(x, (low, high, low, high), value=-torch.inf), size, stride)

    def mean(self, x: Any) -> Any:
        return x.mean((2, 3))

    def flatten(self, x: Any) -> Any:
        return x.flatten(1)

    def linear(self, x: Any, name: str) -> Any:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def concat(self, xs: Sequence[Any]) -> Any:
        return torch.cat(list(xs), 1)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def affine(self, x: Any, scale: Sequence[float], shift: Sequence[float]) -> Any:
        return x * torch.tensor(scale)[:, None, None] + torch.tensor(shift)[:, None, None]

    def height(self, x: Any) -> int:
        return int(x.shape[2])


@pytest.mark.parametrize(("name", "size"), [("alexnet", 224), ("googlenet", 97), ("resnet50", 65)])
def test_a_net_is_torchvisions(name: str, size: int) -> None:
    model = load_model(name, num_classes=11)
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(x)
        found = NETS[name](TorchOperators(model.state_dict(), training=False), x)
    assert found.shape == wanted.shape
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


def test_googlenet_with_trained_weights_changes_its_input() -> None:
    model = load_model("googlenet", num_classes=3)
    x = torch.randn(1, 3, 8, 8)
    model.transform_input = True
    found = transform_input(TorchOperators({}, training=False), x)
    assert torch.allclose(found, model._transform_input(x), atol=1e-6)


def test_alexnet_at_another_size_is_refused() -> None:
    model = load_model("alexnet", num_classes=2)
    with pytest.raises(ValueError, match="6x6"):
        NETS["alexnet"](TorchOperators(model.state_dict(), training=False), torch.zeros(1, 3, 288, 288))
