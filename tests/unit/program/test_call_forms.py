"""Calls by position, by keyword and in mixtures, with defaults, `*args` and `**kwargs`: one call, one program."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import convoy
from convoy.errors import PlanError
from convoy.program.call_forms import ForwardSignature
from convoy.program.runnable_program import Program
from tests.unit.pipeline.untimed import plans_kept

A = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
B = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(2))
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Two(nn.Module):
    """Two inputs and two options."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.depth = nn.Conv2d(3, 4, 3), nn.Conv2d(1, 4, 3)
        self.eval()

    def forward(
        self, image: torch.Tensor, depth: torch.Tensor, scale: float = 1.0, *, gain: float = 1.0
    ) -> torch.Tensor:
        return (self.image(image) + self.depth(depth) * scale) * gain


class Rest(Two):
    def forward(self, image: torch.Tensor, *rest: Any, gain: float = 1.0, **named: Any) -> torch.Tensor:
        return super().forward(image, *rest, gain=gain, **named)


class Anything(Two):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)


FORMS: list[Call] = [
    ((A, B), {}),
    ((A,), {"depth": B}),
    ((), {"image": A, "depth": B}),
    ((), {"depth": B, "image": A}),
    ((A, B, 1.0), {}),
    ((A, B), {"gain": 1.0}),
    ((A,), {"gain": 1.0, "scale": 1.0, "depth": B}),
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("forms") / "perf.db")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows with every run of a program; a warning is an error."""
    seen: list[int] = []
    run = Program.__call__

    def counted(self: Program, *args: Any, flat: bool = False) -> object:
        seen.append(1)
        return run(self, *args, flat=flat)

    monkeypatch.setattr(Program, "__call__", counted)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield seen


def optimized(model: nn.Module, call: Call, settings: convoy.Settings) -> convoy.OptimizedModule:
    with plans_kept():
        return convoy.optimize(model, *call, settings=settings)


def agree(fast: convoy.OptimizedModule, call: Call) -> None:
    args, kwargs = call
    assert_close(fast(*args, **kwargs), fast.model(*args, **kwargs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("example", [FORMS[0], FORMS[3], FORMS[6]], ids=["args", "kwargs", "mixed"])
def test_every_form_of_a_call_runs_the_program(example: Call, settings: convoy.Settings, runs: list[int]) -> None:
    fast = optimized(Two(), example, settings)
    runs.clear()
    for _ in range(2):
        for call in FORMS:
            agree(fast, call)
    assert len(runs) == 2 * len(FORMS)


def test_another_value_of_a_default_is_another_call(settings: convoy.Settings) -> None:
    fast = optimized(Two(), FORMS[0], settings)
    with torch.no_grad(), pytest.warns(UserWarning, match="no plan for these input shapes or dtypes, or for an option"):
        agree(fast, ((A, B, 2.0), {}))


def test_rest_arguments_and_further_keywords(settings: convoy.Settings, runs: list[int]) -> None:
    positional, named = optimized(Rest(), ((A, B), {}), settings), optimized(Rest(), ((A,), {"depth": B}), settings)
    anything = optimized(Anything(), FORMS[2], settings)
    runs.clear()
    for call in (((A, B), {}), ((A, B), {"gain": 1.0})):
        agree(positional, call)
    for call in (((A,), {"depth": B}), ((), {"depth": B, "image": A}), ((A,), {"gain": 1.0, "depth": B})):
        agree(named, call)
    for call in FORMS[2:4]:
        agree(anything, call)
    assert len(runs) == 7


def test_a_call_that_the_signature_cannot_match_says_so_at_the_users_line(settings: convoy.Settings) -> None:
    fast = optimized(Anything(), FORMS[0], settings)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match=r"has \*args, \*\*kwargs, so .*call it with 2 arguments by position") as seen,
    ):
        agree(fast, FORMS[2])
    assert seen[0].filename == __file__


def test_an_exported_module_is_called_by_position_and_by_keyword(settings: convoy.Settings, runs: list[int]) -> None:
    stock = Two()
    fast = optimized(torch.export.export(stock, (A, B)).module(), FORMS[0], settings)
    runs.clear()
    for args, kwargs in FORMS[:4]:
        assert_close(fast(*args, **kwargs), stock(*args, **kwargs), rtol=1e-4, atol=1e-5)
    assert len(runs) == 4


def test_plans_are_loaded_with_inputs_in_any_form(settings: convoy.Settings, runs: list[int], tmp_path: Path) -> None:
    fast = optimized(Two(), FORMS[1], settings)
    with plans_kept():
        fast.tune(kwargs={"depth": B[:1], "image": A[:1]})
    assert not any(plan.baseline for plan in fast.plans)
    files = fast.save(tmp_path / "two.plan.json")
    runs.clear()
    for args, kwargs in FORMS[:4]:
        again = convoy.load(fast.model, files, args, kwargs, settings=settings)
        for count in (1, 2):
            agree(again, ((A[:count], B[:count]), {}))
            agree(again, ((), {"depth": B[:count], "image": A[:count]}))
    assert len(runs) == 16
    with pytest.raises(PlanError, match=r"plan\.inputs"):
        convoy.load(nn.Conv2d(3, 4, 3), files, A, settings=settings)


def test_the_normal_form_and_the_order_of_keywords() -> None:
    forward = ForwardSignature(Rest().forward)
    assert forward.normal((1, 2), {"b": 3, "a": 4}) == ((1, 2), {"gain": 1.0, "a": 4, "b": 3})
    assert forward.normal((), {"b": 3}) is None
    assert list(forward.in_order({"z": 1, "a": 2, "gain": 3, "image": 4})) == ["image", "gain", "a", "z"]
    unknown = ForwardSignature(iter)  # type: ignore[arg-type]
    assert unknown.normal((1,), {}) is None
    assert list(unknown.in_order({"b": 1, "a": 2})) == ["a", "b"]


def test_improving_takes_inputs_in_any_form(settings: convoy.Settings, runs: list[int]) -> None:
    fast = optimized(Two(), FORMS[0], settings)
    with plans_kept():
        for args, kwargs in (FORMS[0], FORMS[3]):
            with pytest.warns(UserWarning, match=r"longer than its limit of 0\.01 s"):
                fast.improve(0.01, args or None, kwargs)
    runs.clear()
    for call in FORMS[:4]:
        agree(fast, call)
    assert len(runs) == 4
