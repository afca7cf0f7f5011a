"""A small net of a residual block, exported once for all tests."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.compilers.host_compiler import compiler_support
from convoy.package.runtime_library import write_runtime
from tests.unit.package.libconvoy import Libconvoy

X = torch.randn(2, 3, 17, 15, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A residual net with every layer of a ResNet, small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 20, 5, stride=2, padding=2, bias=False)
        self.norm = nn.BatchNorm2d(20)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.first, self.second = nn.Conv2d(20, 20, 3, padding=1), nn.Conv2d(20, 20, 3, padding=1)
        self.depthwise = nn.Conv2d(20, 20, 3, padding=1, groups=20)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(20, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 3, h, w] to [n, 7]."""
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        x = torch.relu(self.second(torch.relu(self.first(x))) + x)
        x = torch.nn.functional.hardswish(self.depthwise(x))
        return self.head(self.average(x).flatten(1))


class Mixed(nn.Module):
    """Layers that no C kernel computes, two outputs, and a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, object]:
        """A dict of a tensor and a tuple."""
        y = torch.relu(self.conv(x)) * scale
        return {"map": torch.tanh(y), "rest": (torch.cumsum(y, 1), 3)}


def seeded(kind: type[nn.Module]) -> nn.Module:
    """A module with weights of a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().eval()


@pytest.fixture(scope="session")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of `Block` for the C runtime."""
    if not compiler_support():
        pytest.skip("needs a C compiler")
    path = tmp_path_factory.mktemp("package") / "block.convoy"
    return convoy.export(
        seeded(Block), path, (X,), portable=True, settings=convoy.Settings(effort="none"), name="block"
    )


@pytest.fixture
def damaged(portable: Path, tmp_path: Path) -> Path:
    """A copy of the package to be changed."""
    path = tmp_path / "copy.convoy"
    path.write_bytes(portable.read_bytes())
    return path


def stock(kind: type[nn.Module], *args: torch.Tensor) -> object:
    """PyTorch's own result in float64."""
    model = copy.deepcopy(seeded(kind)).double()
    with torch.no_grad():
        return model(*(arg.double() for arg in args))


@pytest.fixture(scope="session")
def libconvoy(tmp_path_factory: pytest.TempPathFactory) -> Libconvoy:
    """The C runtime, compiled once."""
    if not compiler_support():
        pytest.skip("needs a C compiler")
    return Libconvoy(write_runtime(tmp_path_factory.mktemp("runtime")))
