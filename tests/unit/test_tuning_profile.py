"""The profile of tuning: phases inside phases are counted once, other threads beside the call, and all adds up."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.pipeline import optimize_model
from convoy.tuning_profile import OTHER, ProfileRecorder, TuningProfile, phase, recorded_profile


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("convoy.tuning_profile.time.perf_counter", lambda: self.now)


def test_nested_phases_are_counted_once_and_all_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with recorded_profile() as recorder:
        clock.now += 1
        with phase("build", "aten"):
            clock.now += 2
            with phase("check"):
                clock.now += 4
            clock.now += 2
        with phase("check"):
            clock.now += 3
    found = recorder.profile()
    assert found.total_s == 12.0
    assert [(t.name, t.own_s, t.runs) for t in found.totals()] == [
        ("check", 7.0, 2),
        ("build: aten", 4.0, 1),
        (OTHER, 1.0, 1),
    ]
    table = found.table().splitlines()
    assert table[1].split() == ["check", "7.000", "58.3%", "2"]
    assert table[-1].split() == ["total", "12.000", "100.0%"]


def test_a_phase_that_raises_is_recorded_and_the_next_call_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with recorded_profile() as recorder, pytest.raises(ZeroDivisionError), phase("capture"):
        clock.now += 1 / 0
    assert [span.phase for span in recorder.profile().spans] == ["capture"]
    with phase("capture"):  # nobody records
        pass
    with recorded_profile() as after:
        pass
    assert after.profile() == TuningProfile((), 0.0)


def test_a_call_inside_a_call_goes_on_in_the_same_profile() -> None:
    with recorded_profile() as outer, recorded_profile() as inner, phase("capture"):
        assert inner is outer
    assert [span.phase for span in outer.profile().spans] == ["capture"]


def test_other_threads_have_rows_of_their_own_and_do_not_count_in_the_total() -> None:
    recorder = ProfileRecorder()

    def work() -> None:
        with recorder.phase("build", "inductor"):
            pass

    thread = threading.Thread(target=work)
    with recorder.phase("check", ""):
        thread.start()
        thread.join()
    found = recorder.profile()
    assert {(span.phase, span.thread) for span in found.spans} == {("build", 1), ("check", 0)}
    assert [total.name for total in found.totals()] == ["check", OTHER]


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()


def test_a_call_writes_its_trace_and_prints_its_table(
    net: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tuning.json"
    settings = convoy.Settings(effort="none", db=tmp_path / "perf.db", profile=path)
    found = optimize_model(net, (torch.randn(1, 3, 8, 8),), settings=settings).profile
    phases = {span.phase for span in found.spans}
    assert phases >= {"capture", "count zeros", "spaces", "predict", "select", "build", "check"}
    assert sum(total.own_s for total in found.totals()) == pytest.approx(found.total_s)
    trace = json.loads(path.read_text())["traceEvents"]
    assert {event["name"] for event in trace if event["ph"] == "X"} == phases
    assert {event["args"]["name"] for event in trace if event["ph"] == "M"} >= {"tuning", "thread 0"}
    assert "check: float64" in capsys.readouterr().err


def test_a_profile_that_cannot_be_written_is_named(net: nn.Module, tmp_path: Path) -> None:
    settings = convoy.Settings(effort="none", db=tmp_path / "perf.db", profile=tmp_path / "no" / "tuning.json")
    with pytest.raises(convoy.InputError, match="profile"):
        convoy.optimize(net, (torch.randn(1, 3, 8, 8),), settings=settings)
