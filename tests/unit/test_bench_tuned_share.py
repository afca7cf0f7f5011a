"""bench/tuning/tuned_share.py: its shares and its table; bench/inference/prepare.py: the choices that it throws away."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def script() -> Any:
    return importlib.import_module("bench.tuning.tuned_share")


def test_shares_are_of_the_last_program(script: Any) -> None:
    assert script.shares({"none": 4.0, "10s": 1.0, "30s": 2.0}) == {"none": 0.5, "10s": 2.0, "30s": 1.0}


def test_programs_are_timed_by_what_they_take(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each call moves on: a program that takes twice as long has twice the milliseconds."""
    now = [0.0]
    monkeypatch.setattr(script.time, "perf_counter", lambda: now[0])

    class Fake:
        def __init__(self, seconds: float) -> None:
            self.seconds, self.runnable = seconds, SimpleNamespace()

        def __call__(self, args: Any, kwargs: Any) -> None:
            now[0] += self.seconds

    stock = SimpleNamespace(runnable=None)

    def model(_x: Any) -> None:
        now[0] += 0.5

    found = script.times_in_turn({"none": stock, "10s": Fake(0.25), "30s": Fake(0.125)}, model, (torch.zeros(1),))
    assert found == pytest.approx({"none": 500.0, "10s": 250.0, "30s": 125.0})


def test_the_table_has_shares_and_their_geometric_mean(script: Any) -> None:
    common = {"batch": "1", "dtype": "fp16", "device": "a GPU", "commit": "0123abc", "protocol": "in turn"}
    rows = [
        {**common, "subject": net, "metric": metric, "p50": value}
        for net, values in (("one", ("0.4", "1", "2.5")), ("two", ("0.9", "1", "0.5")))
        for metric, value in zip(("share_none", "share_10s", "replay_ms"), values, strict=True)
    ]
    rows.append({**common, "subject": "one", "metric": "overrun_10s", "p50": "1.01"})
    assert script.tuned_share_table(rows, "Speed").splitlines() == [
        "Speed, a GPU, commit 0123abc, in turn",
        "",
        "| net | dtype | batch | tuned, ms | none | 10 s |",
        "|---|---|---|---|---|---|",
        "| one | fp16 | 1 | 2.500 | 0.40 | 1.00 |",
        "| two | fp16 | 1 | 0.500 | 0.90 | 1.00 |",
        "| geometric mean | | | | 0.60 | 1.00 |",
    ]


def test_choices_that_were_made_beside_others_are_forgotten(tmp_path: Path) -> None:
    """Compiled code stays."""
    prepare = importlib.import_module("bench.inference.prepare")
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "kernel.best_config").write_text("{}")
    (tmp_path / "ab" / "kernel.py").write_text("")
    assert prepare.forget_choices(tmp_path) == 1
    assert [path.name for path in (tmp_path / "ab").iterdir()] == ["kernel.py"]


def test_inductor_needs_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache would keep choices that were made beside others."""
    prepare = importlib.import_module("bench.inference.prepare")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(prepare.sys, "argv", ["prepare.py", "--providers", "convoy,inductor.default"])
    with pytest.raises(SystemExit, match="set TORCHINDUCTOR_CACHE_DIR"):
        prepare.main()


def test_one_provider_that_fails_leaves_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = importlib.import_module("bench.inference.prepare")
    built: list[str] = []

    def framework(name: str, error: Exception | None) -> Any:
        def build() -> Any:
            if error is not None:
                raise error
            return SimpleNamespace(run=lambda: built.append(name))

        way = SimpleNamespace(spare=False, build=build)
        spare = SimpleNamespace(spare=True, build=lambda: pytest.fail("a spare way was built"))
        return SimpleNamespace(id=name, load=lambda: SimpleNamespace(ways=lambda *_: [way, spare]))

    entries = [framework("bad", ValueError("no kernel")), framework("good", None)]
    monkeypatch.setattr(prepare, "entries_of", lambda _names: entries)
    monkeypatch.setattr(prepare.case_inputs, "make", lambda *_: None)
    monkeypatch.setattr(prepare.case_inputs, "read", lambda _folder: None)
    prepare.build(prepare.Case("net"), "bad,good")
    assert built == ["good"]
    assert "bad: ValueError: no kernel" in capsys.readouterr().out
