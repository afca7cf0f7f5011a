"""bench/zoo.py: tiny members of some families, a net that fails is a row, a call goes on where the last one stopped."""

from __future__ import annotations

import copy
import csv
import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from bench.shared.rows import Row
from bench.sweep import zoo_case, zoo_nets, zoo_table

from tests.unit.pipeline.untimed import plans_kept

zoo = importlib.import_module("bench.zoo")

TINY = ("test_byobnet", "test_convnext", "test_efficientnet", "test_nfnet", "test_resnet")


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_net_is_captured_whole_and_right(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "perf.db"))
    with plans_kept():
        found = zoo_case.run_case(f"timm:{name}", "cpu", size=32, training=name == "test_resnet")
    assert (found["ok"], found["kind"]) == (True, "whole"), found
    assert 0 < found["error"] < 1e-5
    assert 0 <= found["own_share"] <= 1
    assert found["convolutions"] > 5
    if "training" in found:
        assert found["training"]["ok"], found["training"]


def test_a_step_that_is_not_pytorchs_is_right_only_where_it_is_about_as_exact() -> None:
    model = torch.nn.Linear(4, 3)
    batch = (torch.randn(5, 4, generator=torch.Generator().manual_seed(1)),)
    mine, theirs = (copy.deepcopy(model) for _ in range(2))
    for twin in (mine, theirs):
        optimizer = torch.optim.SGD(twin.parameters(), 1e-3)
        twin(*batch).square().mean().backward()
        optimizer.step()

    def as_exact() -> bool:
        return zoo_case.is_as_exact(model, lambda y: y.square().mean(), batch, mine, theirs)

    assert as_exact()
    with torch.no_grad():
        mine.weight[0, 0] += 1e-4
    assert not as_exact()


def test_each_family_has_a_small_member() -> None:
    found = zoo_nets.families()
    assert len(found) > 120
    assert not any("test_" in name for name in found.values())
    assert found["timm:convnext"] == "timm:convnext_atto"
    assert found["resnet"] == "resnet18"
    assert found["timm:densenet"] == "timm:densenet121", "`26` is no word of densenet264d"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A sweep over planted nets; the names that were run."""
    ran: list[str] = []

    def measured(name: str, *_: object) -> dict[str, object]:
        ran.append(name)
        right = {"ok": True, "kind": "whole", "error": 1e-6, "stock_error": 1e-6, "first_s": 2.0, "speedup": 1.5}
        return (
            right | {"own_share": 0.5}
            if name != "broken"
            else {"ok": False, "kind": "failed", "why": "took | too long"}
        )

    monkeypatch.setattr(zoo, "measured", measured)
    return ran


def test_a_call_goes_on_and_a_failure_is_a_row(
    planted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for nets in ("one", "one,broken"):
        monkeypatch.setattr(sys, "argv", ["zoo.py", "--nets", nets, "--folder", str(tmp_path), "--minutes", "1"])
        zoo.main()
    assert planted == ["one", "broken"]
    assert "WRONG failed took | too long" in capsys.readouterr().out
    (file,) = tmp_path.glob("zoo-*.csv")
    rows = rows_in(file)
    assert [(row["subject"], row["metric"], row["ok"]) for row in rows if "error" in row["metric"]] == [
        ("one", "error", "true"),
        ("broken", "error", "false"),
    ]
    table = zoo_table.zoo_table(rows, "Families")
    assert "2 nets. inference: 1 failed, 1 whole, 1 not right; inference 1.50x in the mean, 1.50x at least." in table
    assert "| one | whole | 1.0e-06 | 2.0 s | 1.50x | 50% |  |  |" in table
    assert "| broken | inference | failed took \\| too long |" in table


def test_times_may_be_left_out(planted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--nets", "one", "--folder", str(tmp_path), "--no-timing"])
    zoo.main()
    (file,) = tmp_path.glob("zoo-*.csv")
    assert {row["metric"] for row in rows_in(file)} == {"error", "own_share"}


def rows_in(file: Path) -> list[Row]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def test_a_child_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--nets", "no_such_net", "--memory", "64"])
    options = zoo.parsed()
    monkeypatch.setattr(zoo, "__file__", str(Path(__file__).parent / "no_such_script.py"))
    found = zoo.measured("no_such_net", options, 60.0)
    assert (found["ok"], found["kind"]) == (False, "failed")
    assert "exit status 2" in found["why"]
    assert json.dumps(found)
    assert not math.isnan(options.minutes)
