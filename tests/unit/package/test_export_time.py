"""`time_s` bounds a whole export: the tuning of all its programs, and building and checking them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import convoy
from convoy.deadline import Deadline
from convoy.package import export as exporting
from convoy.package import plan_choice
from convoy.package.export_time import BUILD, KEPT_SHARE, time_for_plan
from convoy.tune import SearchResult
from tests.unit.package.conftest import Block, X, seeded


def test_programs_share_what_is_left_after_building() -> None:
    now = 0.0
    deadline = Deadline(60.0, lambda: now)
    assert time_for_plan(deadline, 3, 2.0).seconds == (60.0 - 2 * 2.0 - 3 * BUILD * 2.0) / 3
    now = 50.0
    assert time_for_plan(deadline, 1, 2.0).seconds == 10.0 - BUILD * 2.0
    assert time_for_plan(deadline, 1).seconds == 10.0 * (1 - KEPT_SHARE)
    assert time_for_plan(deadline, 1, 20.0).is_over


def test_without_a_limit_there_is_none() -> None:
    assert not time_for_plan(Deadline(), 3, 2.0).is_limited


@pytest.mark.parametrize("portable", [True, False])
def test_each_program_is_tuned_for_its_share(portable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    optimize_model = exporting.optimize_model

    def measured(*args: Any, deadline: Deadline) -> SearchResult:
        del args
        given.append(deadline.seconds)
        return SearchResult()

    def tuned(*args: Any, deadline: Deadline, **named: Any) -> Any:
        given.append(deadline.seconds)
        return optimize_model(*args, deadline=deadline, **named)

    monkeypatch.setattr(plan_choice, "measure", measured)
    monkeypatch.setattr(exporting, "optimize_model", tuned)
    effort = "quick" if portable else "none"
    settings = convoy.Settings(effort=effort, time_s=600.0, db=tmp_path / "perf.db")
    more = [(torch.cat([X, X]),)]
    convoy.export(seeded(Block), tmp_path / "net.convoy", (X,), more_args=more, portable=portable, settings=settings)
    assert len(given) == 2
    assert 0 < given[0] < 300.0 < given[1] < 600.0


def test_an_overrun_is_reported(tmp_path: Path) -> None:
    settings = convoy.Settings(effort="none", time_s=1e-3, db=tmp_path / "perf.db")
    with pytest.warns(UserWarning, match=r"longer than its limit of 0.001 s \(time_s\)"):
        convoy.export(seeded(Block), tmp_path / "net.convoy", (X,), portable=True, settings=settings)
