"""Commands print files' contents with escapes in place of control characters; a name that is no UTF-8 ends nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from convoy import plan as plans
from convoy.cli.app import app
from convoy.compare.runs import runfile
from convoy.compare.runs.rows import Figure, Row
from convoy.compare.runs.runfile import Run
from convoy.plan import Plan, Step
from convoy.problem import EngineConfig
from convoy.report.tables import print_table

NASTY = "\x1b[2J\x9b31m\u202eevil\u2066\x07\r\x00"
STEP = Step("convert", "", (), ("x",), ("x@nhwc",), "layout:nchw:nhwc:fp32[1,3,8,8]", EngineConfig("aten"), "nhwc", 1.5)
PLAN = Plan("net", "0" * 16, ("fp32[1,3,8,8]",), {"name": "a CPU"}, "as_torch", (STEP,), "exact", border={"x": "nchw"})
MANIFEST = {"date": "", "target": {"name": "cpu"}, "versions": {}, "protocol": "", "commit": "", "request": {}}


def printed(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    text = result.output
    assert all(character.isprintable() or character == "\n" for character in text)
    return text


@pytest.mark.parametrize("field", ["model", "solver", "notes", "target"])
def test_explain_prints_no_control_characters(tmp_path: Path, field: str) -> None:
    data = plans.to_dict(PLAN)
    data[field] = {"notes": [NASTY], "target": {"name": NASTY}}.get(field, NASTY)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    text = printed("explain", str(path))
    assert "\\u202eevil" in text
    other = tmp_path / "other.json"
    plans.save(PLAN, other)
    printed("explain", str(path), "--compare", str(other))


def test_reports_print_no_control_characters(tmp_path: Path) -> None:
    rows = [
        Row(NASTY + name, "[red]\\[b]x", figures=(Figure.once("latency_ms", "ms", 2.0),), notes=(NASTY,))
        for name in ("a", "b")
    ]
    failed = Row(NASTY, "torch", "crashed", NASTY)
    path = tmp_path / "run.json"
    runfile.write(Run("compare", {**MANIFEST, "notes": [NASTY]}, (*rows, failed)), path)
    assert "[red]\\[b]x" in printed("report", str(path), "-o", str(tmp_path / "page.html"))
    printed("report", "--diff", str(path), str(path))


def test_names_that_are_no_utf_8_are_written_and_read_back(tmp_path: Path) -> None:
    name = b"net-\xff\xfe.pt2".decode("utf-8", "surrogateescape")
    plan = dataclasses.replace(PLAN, model=name, notes=(name, "x" * 10_000))
    plans.save(plan, tmp_path / "plan.json")
    found = plans.load(tmp_path / "plan.json")
    assert found.model == "net-??.pt2"
    assert found.notes[0] == "net-??.pt2"
    run = Run("compare", {**MANIFEST, "request": {"models": [name]}}, (Row(name, "torch", "absent", "not there"),))
    runfile.write(run, tmp_path / "run.json")
    assert runfile.read(tmp_path / "run.json").rows[0].subject == "net-??.pt2"
    page = tmp_path / name.replace(".pt2", ".html")
    printed("report", str(tmp_path / "run.json"), "-o", str(page))
    assert page.read_text(encoding="utf-8").startswith("<!")


def test_tables_take_a_cell_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name",), [("[bold]\\[red]x",), (NASTY,)])
    text = capsys.readouterr().out
    assert "[bold]\\[red]x" in text
    assert "\\x1b[2J" in text
    assert all(character.isprintable() or character == "\n" for character in text)
