"""Models by parts that keep something from call to call: it is the stock module's, as if that module had been called."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import convoy
from convoy.pipeline.by_parts.partwise_module import PartwiseModule
from tests.unit.pipeline.untimed import plans_kept


class Recurrent(nn.Module):
    """A convolutional cell whose state is in its attributes, with a reset that users call between two clips."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv2d(2 + 4, 8, 3, padding=1)
        self.hidden: torch.Tensor | None = None
        self.frames = 0

    def reset(self) -> None:
        self.hidden, self.frames = None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.frames += 1
        hidden = x.new_zeros(len(x), 4, *x.shape[2:]) if self.hidden is None else self.hidden
        keep, new = self.gates(torch.cat([x, hidden], 1)).chunk(2, 1)
        self.hidden = keep.sigmoid() * hidden + new.tanh()
        return self.hidden * self.frames


class Buffered(Recurrent):
    """Its state is a buffer that each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        del self.hidden
        self.register_buffer("hidden", None)


class Remembers(Recurrent):
    """Its state is in containers that calls write to."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[torch.Tensor] = deque(maxlen=2)
        self.seen: dict[str, int] = {}

    def reset(self) -> None:
        super().reset()
        self.last.clear()
        self.seen.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + sum(image.mean() for image in self.last) + len(self.seen)
        self.last.append(x)
        self.seen[str(self.frames)] = self.frames
        return y


class Inside(nn.Module):
    """The module that keeps something lies below."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = Recurrent(), nn.Conv2d(4, 3, 3)

    def reset(self) -> None:
        self.cell.reset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x))


class Counts(nn.Module):
    """A number that it counts is in an array, in an iterator, in a deque, or the class's."""

    of_class = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.conv, self.where = nn.Conv2d(2, 3, 3), where
        self.array, self.iterator, self.calls = np.zeros(1), itertools.count(1), deque([0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "array":
            self.array += 1
            return self.conv(x) * float(self.array[0])
        if self.where == "iterator":
            return self.conv(x) * next(self.iterator)
        if self.where == "class":
            Counts.of_class += 1
            return self.conv(x) * Counts.of_class
        self.calls.append(self.calls.pop() + 1)
        return self.conv(x) * self.calls[0]


KINDS = [Recurrent, Buffered, Remembers, Inside]


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with plans_kept():
        yield


def by_parts(kind: Callable[[], nn.Module], settings: convoy.Settings) -> tuple[PartwiseModule, nn.Module, nn.Module]:
    """The module by parts, its stock module, and a copy of that which PyTorch runs."""
    torch.manual_seed(0)
    model = kind().eval()
    stock = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="was optimized by parts"):
        fast = convoy.optimize(model, (frame(0),), settings=settings)
    assert isinstance(fast, PartwiseModule)
    return fast, model, stock


def frame(index: int) -> torch.Tensor:
    return torch.randn(1, 2, 6, 7, generator=torch.Generator().manual_seed(index))


def assert_alike(fast: nn.Module, stock: nn.Module) -> None:
    with torch.no_grad():
        for index in range(3):
            torch.testing.assert_close(fast(frame(index)), stock(frame(index)), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("db") / "perf.db")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("through", ["the stock module", "the optimized module"])
def test_a_reset_resets(kind: type[nn.Module], through: str, settings: convoy.Settings) -> None:
    fast, model, stock = by_parts(kind, settings)
    for _ in range(2):
        assert_alike(fast, stock)
        assert fast.stale() is None
        stock.reset()  # pyright: ignore
        (model if through == "the stock module" else fast).reset()  # pyright: ignore


def test_what_calls_leave_is_read_from_the_stock_module(settings: convoy.Settings) -> None:
    fast, model, stock = by_parts(Buffered, settings)
    assert_alike(fast, stock)
    assert fast.frames == model.frames == 3
    torch.testing.assert_close(fast.hidden, stock.hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(fast.state_dict()), dict(stock.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_keeps_a_state_of_its_own(kind: type[nn.Module], settings: convoy.Settings) -> None:
    fast, _, stock = by_parts(kind, settings)
    assert_alike(fast, stock)
    assert_alike(copy.deepcopy(fast), copy.deepcopy(stock))
    assert_alike(fast, stock)


def test_the_state_lasts_over_a_refresh(settings: convoy.Settings) -> None:
    fast, model, stock = by_parts(Inside, settings)
    assert_alike(fast, stock)
    for one in (model, stock):
        nn.init.constant_(one.head.bias, 3.0)  # pyright: ignore
    fast.refresh()
    assert_alike(fast, stock)
    assert fast.stale() is None


def test_a_model_whose_class_counts_is_not_captured_whole(settings: convoy.Settings) -> None:
    by_parts(partial(Counts, "class"), settings)


@pytest.mark.parametrize("where", ["array", "iterator", "deque"])
def test_a_model_that_counts_out_of_sight_counts_on(where: str, settings: convoy.Settings) -> None:
    fast, _, stock = by_parts(partial(Counts, where), settings)
    assert_alike(fast, stock)
    assert fast.stale() is None


def test_an_attribute_that_calls_do_not_write_still_counts(settings: convoy.Settings) -> None:
    fast, model, stock = by_parts(Recurrent, settings)
    assert_alike(fast, stock)
    model.gates.padding = stock.gates.padding = (2, 2)  # pyright: ignore
    stock.reset()  # pyright: ignore
    model.reset()  # pyright: ignore
    assert fast.stale() == "gates.padding was changed"
