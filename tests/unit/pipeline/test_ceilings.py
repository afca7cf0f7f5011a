"""Without room for a device's ceilings a net is tuned all the same, and its report says what it lacks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import nn

import convoy
from convoy.deadline import Deadline
from convoy.measurement import Peaks, detect_target
from convoy.pipeline import ceilings, optimize_model
from convoy.pipeline.ceilings import BUSY, NO_CEILINGS, ceiling_notes, measure_ceilings
from convoy.report.html import render
from convoy.settings import Effort
from convoy.target import Target


def no_room(target: Target, *, brief: bool) -> NoReturn:
    raise torch.OutOfMemoryError(f"CUDA out of memory on {target.name}, planted")


def test_ceilings_are_found_where_there_is_room() -> None:
    found = measure_ceilings(detect_target("cpu"))
    assert found is not None
    assert found.bytes_per_s > 0
    assert ceiling_notes(dataclasses.replace(found, settled=True)) == []
    assert ceiling_notes(dataclasses.replace(found, settled=False)) == [BUSY]


def test_a_net_is_tuned_without_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "find_peaks", lambda *_, **__: None)  # those of this device may be shipped
    monkeypatch.setattr(ceilings, "peaks", no_room)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    settings = convoy.Settings(db=tmp_path / "perf.db", effort=convoy.Effort.NONE)
    result = optimize_model(model, (torch.randn(1, 3, 16, 16),), name="small", settings=settings)
    assert NO_CEILINGS in result.plan.notes
    assert result.summary.peaks == {}
    assert result.summary.layers
    assert all(layer.floor_us is None for layer in result.summary.layers)
    page = render(result.summary)
    assert NO_CEILINGS in page
    assert "<h2>Roofline</h2>" not in page


def test_what_is_no_lack_of_memory_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(target: Target, *, brief: bool) -> NoReturn:
        assert not brief
        raise RuntimeError(f"illegal address on {target.name}, planted")

    monkeypatch.setattr(ceilings, "peaks", broken)
    with pytest.raises(RuntimeError, match="illegal address"):
        measure_ceilings(detect_target("cpu"))


@pytest.mark.parametrize(("time_s", "brief"), [(float("inf"), False), (600.0, False), (30.0, True)])
def test_a_call_with_little_time_takes_brief_ceilings(
    monkeypatch: pytest.MonkeyPatch, time_s: float, brief: bool
) -> None:
    seen: list[bool] = []

    def rates(target: Target, *, brief: bool) -> Peaks:
        seen.append(brief)
        return Peaks(1.0, {"fp32": 1.0})

    monkeypatch.setattr("convoy.pipeline.ceilings.peaks", rates)
    measure_ceilings(detect_target("cpu"), Effort.QUICK, Deadline(time_s, lambda: 0.0))
    assert seen == [brief]
