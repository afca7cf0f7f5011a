"""convoy optimize --timeline: when each step runs, as planned and as measured, as Perfetto reads it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from convoy import plan as plans
from tests.e2e.command import Command, summary

NET = (
    "net.py:small",
    "--trust",
    "--batch",
    "2",
    "--size",
    "8",
    "--only-engines",
    "gemm",
    "--effort",
    "none",
    "--solver",
    "baseline",
)
"""With the baseline's plan nothing is fallen back from, whatever the clock says."""


def rows_of(path: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
    """A trace's steps in their order, and its rows' names, both by process."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(set(names.values())) == len(names)
    steps = {name: [e for e in events if e["ph"] == "X" and e["pid"] == pid] for pid, name in names.items()}
    rows = {
        name: [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid]
        for pid, name in names.items()
    }
    assert sum(map(len, steps.values())) == sum(e["ph"] == "X" for e in events)
    return steps, rows


@pytest.mark.parametrize("train", [True, False])
def test_a_trace_of_the_plan_and_of_what_was_measured(convoy_command: Command, folder: Path, train: bool) -> None:
    files = {name: folder / f"timed.{name}" for name in ("plan", "json", "report", "timeline")}
    words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    convoy_command.works("optimize", *NET, *(["--train"] if train else []), *words)
    plan, said = plans.load(files["plan"]), summary(files["json"])
    steps, rows = rows_of(files["timeline"])
    assert plan.steps
    assert rows == {"planned": ["stream 0"], "measured": ["stream 0"]}
    assert {name: len(found) for name, found in steps.items()} == dict.fromkeys(
        ("planned", "measured"), len(plan.steps)
    )
    for found in steps.values():
        assert [e["args"]["engine"] for e in found] == [step.config.engine for step in plan.steps]
        assert all(e["dur"] > 0 for e in found)
        assert found[0]["ts"] == 0
        assert all(after["ts"] > before["ts"] for before, after in pairwise(found))

    planned, measured = steps["planned"], steps["measured"]
    ends = [e["ts"] + e["dur"] for e in planned]
    assert [e["ts"] for e in planned] == pytest.approx([0, *ends[:-1]], abs=0.01)
    assert [e["dur"] for e in planned] == [round(step.median_us, 3) for step in plan.steps]
    assert ends[-1] == pytest.approx(said["schedule"]["serial_us"], abs=0.1)
    longest = sum(e["dur"] for e in planned if e["args"]["critical"])
    assert longest == pytest.approx(said["schedule"]["critical_us"], abs=0.1)
    assert 0 < longest <= said["schedule"]["serial_us"] + 0.1
    kept = [(s["name"], round(s["start_us"], 3), round(s["duration_us"], 3), s["critical"]) for s in said["timeline"]]
    assert [(e["name"], e["ts"], e["dur"], e["args"]["critical"]) for e in measured] == kept
    assert [e["name"] for e in measured] == [e["name"] for e in planned]
    assert any(e["args"]["critical"] for e in measured)

    page = files["report"].read_text(encoding="utf-8").partition("<h2>Timeline</h2>")[2].partition("</svg>")[0]
    assert len(re.findall("<rect", page)) == len(plan.steps)
    assert ">stream 0</text>" in page
