"""Models that keep something from call to call in Python attributes: what later results depend on is never left out."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import convoy
from convoy.errors import CaptureError
from convoy.pipeline.check.call_state import check_repeats
from convoy.pipeline.isolation import isolate

X = torch.rand(2, 3, 8, 10, generator=torch.Generator().manual_seed(3))


def body() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("db") / "perf.db")


class Remembers(nn.Module):
    """Its outputs depend on its calls before: by a tensor, a dict of tensors, an object or a flag that the first call changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = body(), kind
        self.tensor: torch.Tensor | None = None
        self.kept, self.first, self.object = dict[str, torch.Tensor](), True, SimpleNamespace(calls=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if self.kind == "tensor":
            self.tensor = y = y if self.tensor is None else y + self.tensor
        elif self.kind == "dict":
            self.kept["y"] = y = y + self.kept.get("y", 0.0)
        elif self.kind == "object":
            self.object.calls += 1
            y = y * self.object.calls
        elif self.first:
            self.first, y = False, y * 2
        return y


class ByChance(nn.Module):
    """As with a library that reads memory that nobody wrote: its second call's results are others, a copy's first are not."""

    def __init__(self, *, everywhere: bool) -> None:
        super().__init__()
        self.body, self.everywhere, self.calls = body(), everywhere, np.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return self.body(x) * (float(self.calls[0]) if self.everywhere or torch.backends.mkldnn.enabled else 1.0)


def test_results_that_differ_by_a_librarys_fault_are_no_state() -> None:
    with torch.no_grad():
        isolated = isolate(ByChance(everywhere=False).eval(), (X,), {})
        check_repeats(isolated.another(), isolated, "cpu")
        isolated = isolate(ByChance(everywhere=True).eval(), (X,), {})
        with pytest.raises(CaptureError, match="depend on its calls before"):
            check_repeats(isolated.another(), isolated, "cpu")


@pytest.mark.parametrize(
    ("kind", "named"), [("tensor", "tensor"), ("dict", "kept"), ("object", "object"), ("flag", "first")]
)
def test_a_model_that_remembers_its_calls_remembers(kind: str, named: str, settings: convoy.Settings) -> None:
    x = X
    torch.manual_seed(0)
    model = Remembers(kind).eval()
    stock = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=f"results depend on its attribute {named}, which a call changes"):
        fast = convoy.optimize(model, (x,), settings=settings)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), stock(x), rtol=1e-4, atol=1e-5)


def test_a_model_that_stores_what_it_does_not_read_is_captured_whole(settings: convoy.Settings) -> None:
    class Stores(nn.Module):
        def __init__(self, every_time: bool) -> None:
            super().__init__()
            self.body, self.every_time, self.features = body(), every_time, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            if self.every_time or self.features is None:
                self.features = y
            return y

    x = X
    with pytest.warns(UserWarning, match="stores a tensor in features in every call") as found:
        fast = convoy.optimize(Stores(every_time=True).eval(), (x,), settings=settings)
    assert not fast.plan.notes or "by parts" not in str(fast.plan.notes)
    assert any("stores a tensor" in note for note in fast.plan.notes)
    assert [one.filename for one in found if "stores a tensor" in str(one.message)] == [__file__]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        convoy.optimize(Stores(every_time=False).eval(), (x,), settings=settings)
    assert not [one for one in found if "stores a tensor" in str(one.message)]
