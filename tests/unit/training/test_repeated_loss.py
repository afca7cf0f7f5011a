"""A step whose loss differs from call to call, with the same tensors and random states, is PyTorch's."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convoy
from convoy.errors import CaptureError
from convoy.training.repeated_loss import check_repeats
from convoy.training.stock_step import StockStep
from tests.unit.pipeline.untimed import plans_kept


class Counting(nn.Module):
    """Its output grows from call to call; the number is in an iterator, an array, a deque, or the class's."""

    of_class = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.conv, self.head, self.where = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), where
        self.iterator, self.array, self.calls = itertools.count(1), np.zeros(1), deque([0])
        self.generator = np.random.default_rng(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).mean((2, 3))) * self.factor()

    def factor(self) -> float:
        if self.where == "iterator":
            return next(self.iterator)
        if self.where == "array":
            self.array[0] += 1
            return float(self.array[0])
        if self.where == "generator":
            return self.generator.random()
        if self.where == "class":
            Counting.of_class += 1
            return Counting.of_class
        self.calls.append(self.calls.pop() + 1)
        return self.calls[0]


class Steady(nn.Module):
    """What a step may change and draw: running statistics, a queue of keys, dropout, a grid that the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(4, 5)
        self.register_buffer("queue", torch.ones(6, 4))
        self.grid: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.grid is None:
            self.grid = torch.linspace(0, 1, 6)
        keys = (self.body(x) * self.grid).mean((2, 3))
        found = self.head(keys) + (keys @ self.queue.T).mean()
        self.queue = torch.cat([keys.detach(), self.queue])[:6]
        return found


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(
        effort="none", isolate=False, only_engines=("aten",), db=tmp_path_factory.mktemp("db") / "p.db"
    )


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with plans_kept():
        yield


@pytest.mark.parametrize("where", ["iterator", "array", "generator", "class", "deque"])
def test_a_model_that_counts_out_of_sight_trains_by_pytorch(where: str, settings: convoy.Settings) -> None:
    model = Counting(where)
    with pytest.warns(UserWarning, match="two calls give the losses .*: PyTorch's own step runs"):
        step = convoy.training_step(model, F.cross_entropy, sgd(model), batch(), settings=settings)
    assert step.plan.baseline


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_what_a_step_changes_by_its_tensors_repeats(amp: torch.dtype | None) -> None:
    torch.manual_seed(0)
    check_repeats(StockStep(Steady().train(), F.cross_entropy, amp, batch(), scaled=False))


def test_a_library_that_reads_unwritten_memory_is_no_state() -> None:
    numbers = itertools.count(1)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) * (next(numbers) if torch.backends.mkldnn.enabled else 1)

    check_repeats(StockStep(Steady().train(), loss, None, batch(), scaled=False))


def test_a_loss_that_counts_does_not_repeat() -> None:
    numbers = itertools.count(1)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) * next(numbers)

    with pytest.raises(CaptureError, match="counts its calls"):
        check_repeats(StockStep(Steady().train(), loss, None, batch(), scaled=False))


def in_array() -> Callable[..., torch.Tensor]:
    calls = np.zeros(1)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return F.cross_entropy(output, target) * float(calls[0])

    return loss


def in_deque() -> Callable[..., torch.Tensor]:
    calls: deque[int] = deque(maxlen=3)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return F.cross_entropy(output, target) * len(calls)

    return loss


@pytest.mark.parametrize("make", [in_array, in_deque])
def test_a_loss_that_counts_in_what_it_reads_counts_as_with_pytorch(
    make: Callable[[], Callable[..., torch.Tensor]], settings: convoy.Settings
) -> None:
    torch.manual_seed(0)
    model, stock = Steady(), Steady()
    stock.load_state_dict(model.state_dict())
    loss, optimizer = make(), sgd(stock)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = convoy.training_step(model, make(), sgd(model), batch(), settings=settings)
    x, target = batch()
    for index in range(3):
        torch.manual_seed(index)
        found = step(x, target)
        torch.manual_seed(index)
        optimizer.zero_grad()
        wanted = loss(stock(x), target)
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(found, wanted.detach())


class Meter:
    """As in many training scripts: an object that a forward updates."""

    def __init__(self) -> None:
        self.count, self.scale = 0, 0.5

    def update(self, number: int) -> None:
        self.count += number


class Configured(nn.Module):
    """It reads a number of an object that it holds; with `meters` it also counts there."""

    def __init__(self, *, meters: bool) -> None:
        super().__init__()
        self.conv, self.config, self.meters = nn.Conv2d(3, 5, 3), Meter(), meters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.meters:
            self.config.update(len(x))
        return self.conv(x).mean((2, 3)) * self.config.scale


def test_a_number_of_an_object_that_the_model_holds_is_watched(settings: convoy.Settings) -> None:
    model = Configured(meters=False)
    step = convoy.training_step(model, F.cross_entropy, sgd(model), batch(), settings=settings)
    x, target = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x, target)
    model.config.scale = 3.0
    wanted = F.cross_entropy(model(x), target)
    with pytest.warns(
        UserWarning, match="'config.scale', which the model or its loss reads, was changed after capture"
    ):
        torch.testing.assert_close(step(x, target), wanted.detach())


def test_an_object_that_the_model_updates_is_updated_once_a_step(settings: convoy.Settings) -> None:
    model = Configured(meters=True)
    with pytest.warns(UserWarning, match="changes the attribute 'config' of a module in every call"):
        step = convoy.training_step(model, F.cross_entropy, sgd(model), batch(), settings=settings)
    assert model.config.count == 0
    for _ in range(2):
        step(*batch())
    assert model.config.count == 8
