"""The end-to-end tests share a small net, and settings with a database of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from tests.e2e import command as commands


class SmallNet(nn.Module):
    """Every kind of region in little: conv + batch norm + ReLU, residual, depthwise, concatenation, pooling, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.left = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16 * 16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = torch.relu(x + self.left(x))
        return self.head(self.pool(torch.cat([y, self.depthwise(y)], 1)))


@pytest.fixture
def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return SmallNet().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for all tests: what one has measured, the next need not."""
    return tmp_path_factory.mktemp("db") / "perf.db"


@pytest.fixture
def settings(database: Path) -> convoy.Settings:
    return convoy.Settings(db=database, isolate=False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with net.py in it, and one database for all tests of the command line."""
    path = tmp_path_factory.mktemp("command")
    (path / "net.py").write_text(commands.NET, encoding="utf-8")
    return path


@pytest.fixture
def convoy_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> commands.Command:
    """`convoy` in that folder, on that database."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CONVOY_DB", str(folder / "perf.db"))
    return commands.Command(capsys, monkeypatch)
