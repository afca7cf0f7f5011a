"""Attributes that calls of the model fill: a call of the stock module leaves programs in use, a change of the user's does not."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import convoy
from convoy.capture.state.call_leftovers import CallLeftovers, same_value
from tests.unit.pipeline.untimed import plans_kept


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("db") / "perf.db")


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with plans_kept():
        yield


class Levels:
    """As torchvision's LevelMapper: an object with numbers, which is called."""

    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, value: int) -> int:
        return max(value, self.least)


class Caching(nn.Module):
    """Makes a grid, scales and an object in its first call, as torchvision's MultiScaleRoIAlign does, and a list in each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.grid: torch.Tensor | None = None
        self.scales: list[float] | None = None
        self.cache: dict[str, object] = {}
        self.pyramid: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.grid is None:
            self.grid = torch.linspace(0, 1, x.shape[-1])
            self.scales = [0.25 * x.shape[-1]]
            self.cache["levels"] = Levels(2)
        self.pyramid = [self.conv(x) * self.grid]
        self.pyramid.append(self.pyramid[0] * self.scales[0])
        return self.pyramid[0] + self.pyramid[1]


class Branching(nn.Module):
    """Programs compute a part of this model; code between the parts fills an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.scales: list[float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scales is None:
            self.scales = [0.5]
        y = self.body(x) * self.scales[0]
        return y if float(y.sum()) > 0 else -y


def image(width: int = 8) -> torch.Tensor:
    return torch.randn(1, 3, 8, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:convoy. PyTorch stores a tensor")
@pytest.mark.filterwarnings("ignore:convoy. Branching was optimized by parts")
@pytest.mark.parametrize("kind", [Caching, Branching])
@torch.no_grad()
def test_a_call_of_the_stock_module_is_no_change(kind: type[nn.Module], settings: convoy.Settings) -> None:
    model = kind().eval()
    fast = convoy.optimize(model, (image(),), settings=settings)
    assert model.scales is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            wanted = model(image())
            torch.testing.assert_close(fast(image()), wanted)
    assert fast.stale() is None
    twin = copy.deepcopy(fast)
    twin.stock(image())
    assert twin.stale() is None


@pytest.mark.filterwarnings("ignore:convoy. PyTorch stores a tensor")
@torch.no_grad()
def test_another_value_than_a_call_leaves_is_a_change(settings: convoy.Settings) -> None:
    model = Caching().eval()
    fast = convoy.optimize(model, (image(),), settings=settings)
    model(image())
    assert fast.stale() is None
    model.scales = [3.0]
    with pytest.warns(UserWarning, match=r"scales\S* was changed after tuning"):
        torch.testing.assert_close(fast(image()), model(image()))
    fast.refresh()
    torch.testing.assert_close(fast(image()), model(image()))
    assert fast.stale() is None


@pytest.mark.filterwarnings("ignore:convoy. Branching was optimized by parts")
@torch.no_grad()
def test_between_parts_another_value_than_a_call_leaves_is_used(settings: convoy.Settings) -> None:
    model = Branching().eval()
    fast = convoy.optimize(model, (image(),), settings=settings)
    torch.testing.assert_close(fast(image()), model(image()))
    model.scales = [3.0]
    torch.testing.assert_close(fast(image()), model(image()))
    assert fast.stale() is None


@pytest.mark.filterwarnings("ignore:convoy. PyTorch stores a tensor")
@torch.no_grad()
def test_a_grid_of_another_size_is_a_change(settings: convoy.Settings) -> None:
    model = Caching().eval()
    fast = convoy.optimize(model, (image(),), settings=settings)
    model(image(6))
    assert fast.stale() == "grid was changed"


class Smoothing(nn.Module):
    """Adds a value of the previous call to its result. Calls with one image in a row do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.before: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        self.before = y if self.before is None else 0.5 * self.before + 0.5 * y
        return self.before


class CachingValues(nn.Module):
    """Keeps the mean of the first image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = x.mean()
        return self.conv(x - self.mean)


@pytest.mark.parametrize(("kind", "attribute"), [(Smoothing, "before"), (CachingValues, "mean")])
@torch.no_grad()
def test_results_that_depend_on_the_images_before_are_pytorchs(
    kind: type[nn.Module], attribute: str, settings: convoy.Settings
) -> None:
    model, twin = kind().eval(), kind().eval()
    twin.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fast = convoy.optimize(model, (image(),), settings=settings)
    assert any(f"results depend on its attribute {attribute}" in str(one.message) for one in told)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scale in (1.0, 3.0, 0.1):
            torch.testing.assert_close(fast(image() * scale), twin(image() * scale))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2), torch.zeros(2), False),
        ([1, {"a": torch.ones(1)}], [1, {"a": torch.ones(1)}], True),
        ([1, {"a": torch.ones(1)}], [1, {"b": torch.ones(1)}], False),
        ((1, 2), [1, 2], False),
        (SimpleNamespace(k=1), SimpleNamespace(k=1), True),
        (SimpleNamespace(k=1), SimpleNamespace(k=2), False),
        (Levels(1), Levels(1), True),
        (Levels(1), Levels(2), False),
        (functools.partial(max, 1), functools.partial(max, 1), False),
        (nn.ReLU(), nn.ReLU(), False),
        (None, 0, False),
    ],
)
def test_values_are_compared_by_what_they_hold(one: object, other: object, same: bool) -> None:
    assert same_value(one, other) is same


def test_an_attribute_of_a_module_that_is_gone_is_not_explained() -> None:
    left = CallLeftovers({"neck.grid": 1})
    assert not left.explain("neck.grid", {})
    assert not left.explain("neck.grids", {"neck": nn.ReLU()})
