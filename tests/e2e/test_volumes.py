"""Nets with instance norms and poolings of volumes by the public calls: captured whole, right against float64, trained."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

import convoy
from tests.unit.pipeline.untimed import plans_kept


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("db") / "perf.db")


@pytest.fixture(scope="module", autouse=True)
def kept() -> Iterator[None]:
    """Every right plan is kept: nothing here depends on the clock."""
    with plans_kept():
        yield


class Block(nn.Module):
    """Two convolutions of a 3-D U-Net with their instance norms."""

    def __init__(self, c: int, k: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(c, k, 3, stride, 1), nn.Conv3d(k, k, 3, padding=1)
        self.norms = nn.ModuleList(nn.InstanceNorm3d(k, affine=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.leaky_relu(self.norms[0](self.first(x)), 0.01)
        return functional.leaky_relu(self.norms[1](self.second(x)), 0.01)


class UNet(nn.Module):
    """A 3-D U-Net of two sizes, as nnU-Net builds them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = Block(1, 4), Block(4, 8, 2)
        self.up, self.after, self.head = nn.ConvTranspose3d(8, 4, 2, 2), Block(8, 4), nn.Conv3d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.head(self.after(torch.cat([self.up(self.deep(skip)), skip], 1)))


def generator() -> nn.Module:
    """A GAN's generator: reflected borders, instance norms, a transposed convolution."""
    layers = [nn.ReflectionPad2d(2), nn.Conv2d(3, 4, 5), nn.InstanceNorm2d(4), nn.ReLU(True)]
    layers += [nn.Conv2d(4, 8, 3, 2, 1), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.ReLU(True)]
    layers += [nn.ConvTranspose2d(8, 4, 3, 2, 1, 1), nn.InstanceNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 3, 1), nn.Tanh()]
    return nn.Sequential(*layers)


class Clips(nn.Module):
    """Poolings of volumes of every kind: with padding, with a ceiling, of averages, to a given size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(8, 4, 1)
        self.most, self.mean = nn.MaxPool3d(3, 2, 1), nn.AvgPool3d(3, 2, 1, count_include_pad=False)
        self.ceiled, self.size, self.peak = (
            nn.MaxPool3d(2, ceil_mode=True),
            nn.AdaptiveAvgPool3d((1, 2, 2)),
            nn.AdaptiveMaxPool3d(1),
        )
        self.head = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.first(x))
        x = self.ceiled(self.second(torch.cat([self.most(x), self.mean(x)], 1)))
        return self.head(torch.cat([self.size(x).flatten(1), self.peak(x).flatten(1)], 1))


class Grouped(nn.Module):
    """Grouped and depthwise convolutions of volumes, transposed too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(4, 8, 3, padding=1, groups=2), nn.BatchNorm3d(8)
        self.depthwise, self.flat = nn.Conv3d(8, 8, 3, padding=1, groups=8), nn.Conv3d(8, 4, (1, 3, 3), 2, groups=4)
        self.up, self.head = nn.ConvTranspose3d(4, 4, 2, 2, groups=2), nn.Conv3d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(self.flat(self.depthwise(functional.relu(self.norm(self.first(x)))))))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "3-D U-Net": (UNet, (2, 1, 4, 6, 4)),
    "generator": (generator, (2, 3, 8, 8)),
    "clips": (Clips, (2, 2, 5, 10, 9)),
    "grouped": (Grouped, (2, 4, 6, 8, 8)),
}


def made(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A net, the same in float64, an input."""
    make, shape = NETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net, x = make(), torch.randn(shape)
    return net, copy.deepcopy(net).double(), x


@pytest.mark.parametrize("name", NETS)
def test_a_net_is_captured_whole_and_right(name: str, settings: convoy.Settings):
    net, exact, x = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = convoy.optimize(net.eval(), (x,), settings=settings)
    assert isinstance(fast, convoy.OptimizedModule)
    expected = exact.eval()(x.double())
    assert (fast(x) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("name", NETS)
def test_training_steps_follow_float64(name: str, settings: convoy.Settings):
    """Parameters and running statistics after two steps."""
    net, exact, x = made(name)
    target = torch.ones_like(copy.deepcopy(net)(x))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, exact)]
    step = convoy.training_step(net, functional.mse_loss, optimizers[0], (x, target), settings=settings)
    for _ in range(2):
        step(x, target)
        optimizers[1].zero_grad()
        functional.mse_loss(exact(x.double()), target.double()).backward()
        optimizers[1].step()
    stored = net.state_dict()
    for key, right in exact.state_dict().items():
        assert (stored[key] - right).double().norm() <= 1e-5 * right.double().norm() + 1e-7, key


@pytest.mark.parametrize("name", NETS)
def test_torch_compile_is_right_in_both_passes(name: str, settings: convoy.Settings):
    net, exact, x = made(name)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = torch.compile(net, backend="convoy", options={"effort": "none", "db": str(settings.db)})
        y = fast(x)
    expected = exact(x.double())
    assert (y - expected).norm() < 1e-5 * expected.norm()
    y.square().mean().backward()
    expected.square().mean().backward()
    for (key, have), right in zip(net.named_parameters(), exact.parameters(), strict=True):
        assert (have.grad - right.grad).norm() <= 1e-4 * right.grad.norm() + 1e-6, key
