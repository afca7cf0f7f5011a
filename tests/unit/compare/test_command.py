"""convoy compare from the command line: what is wrong is said before anything is run, and a run ends in tables, file and page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from convoy.cli.app import app
from convoy.compare import child_processes, comparison
from convoy.compare.options import ablation
from convoy.compare.runs.rows import Row
from convoy.compare.runs.runfile import Run, write
from convoy.errors import InputError
from tests.unit.compare.examples import compare_run, figures, options_run

ROOT = Path(__file__).parents[3]
RIGHT = Row("net", "jax", figures=figures(1.0))
NET = f"{Path(__file__).parent / 'planted_frameworks.py'}:tiny"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--batch", "0"], "--batch"),
        (["--batch", "1,x"], "--batch"),
        (["--rounds", "2"], "--rounds"),
        (["--effort", "much"], "--effort"),
        (["--threads", "0"], "--threads"),
        (["--timeout-s", "0"], "--timeout-s"),
        (["--timeout-s", "-5"], "--timeout-s"),
        (["--timeout-s", "nan"], "--timeout-s"),
        (["--seconds", "-1"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--dtype", "int8"], "--dtype"),
        (["--dtype", "fp64"], "--dtype"),
        (["--dtype", "bf16", "--options", "all"], "--dtype"),
        (["--device", "tpu"], "--device"),
        (["--frameworks", "caffe"], "--frameworks"),
        (["--frameworks", ","], "--frameworks"),
        (["--options", "turbo"], "--options"),
        (["--options", "all", "--frameworks", "torch"], "--options"),
        (["--memory-limit", "much"], "--memory-limit"),
        (["--run", "no_such_folder/run.json"], "--run"),
        (["--run", "a.json", "--report", "a.json"], "--report"),
        (["--out", "no_such_folder/run.json"], "--out"),
        (["-o", "a.json", "--run", "b.json"], "--run"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_run(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child_processes, "ChildSession", None)
    done = CliRunner().invoke(app, ["compare", "alexnet", *words])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(named)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--frameworks", "torch,gone=no_such_module:X"], ["--options", "all"]])
def test_a_model_that_is_none_leaves_no_file(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child_processes, "ChildSession", None)
    done = CliRunner().invoke(app, ["compare", "nosuchnet", *words])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith("MODEL")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ((), 1),
        ((Row("net", "torch", "timeout", "slow"),), 1),
        ((Row("net", "torch", "timeout", "slow"), RIGHT, replace(RIGHT, provider="torch", batch=8)), 1),
        ((Row("net", "torch", "timeout", "slow"), replace(RIGHT, provider="mine")), 0),
    ],
    ids=["nothing", "a failure", "others worked", "one worked"],
)
def test_a_run_in_which_nothing_worked_that_was_asked_for_exits_1(
    rows: tuple[Row, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "compare", lambda *_, **__: Run("compare", {}, rows))
    words = ["--frameworks", "torch,mine=own:X", "-o", str(tmp_path / "run.json")]
    done = CliRunner().invoke(app, ["compare", NET, "--trust", *words])
    assert done.exit_code == code, done.output
    assert "run:  " in done.output
    failed = Run("options", {}, (Row("net", "defaults", "timeout", "slow", detail={"role": "defaults"}),))
    monkeypatch.setattr(ablation, "search_options", lambda *_, **__: failed)
    done = CliRunner().invoke(app, ["compare", NET, "--trust", "--options", "all", "-o", str(tmp_path / "run.json")])
    assert done.exit_code == 1


@pytest.mark.parametrize("word", ["--out", "-o", "--run"])
def test_the_run_file_has_the_name_that_is_given(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def compare(_cases: Any, _entries: Any, path: Path, **_more: Any) -> Run:
        asked.append(path)
        return compare_run()

    monkeypatch.setattr(comparison, "compare", compare)
    done = CliRunner().invoke(
        app, ["compare", NET, "--trust", "--frameworks", "torch", word, str(tmp_path / "mine.json")]
    )
    assert done.exit_code == 0, done.output
    assert asked == [tmp_path / "mine.json"]


@pytest.mark.parametrize("kind", ["compare", "options"])
def test_a_run_ends_in_tables_and_a_page(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def compare(cases: Any, entries: Any, path: Path, **more: Any) -> Run:
        asked.update(more, cases=cases, entries=entries, path=path)
        return compare_run()

    def search(cases: Any, words: str, path: Path, **more: Any) -> Run:
        asked.update(more, cases=cases, words=words, path=path)
        return options_run()

    monkeypatch.setattr(comparison, "compare", compare)
    monkeypatch.setattr(ablation, "search_options", search)
    monkeypatch.chdir(tmp_path)
    words = ["--options", "compile,bf16"] if kind == "options" else ["--frameworks", "torch,convoy"]
    words += ["--batch", "1,8,1", "--train", "--threads", "3", "--memory-limit", "2GiB", "--report", "page.html"]
    done = CliRunner().invoke(app, ["compare", NET, "--trust", "--device", "cpu", *words])
    assert done.exit_code == 0, done.output
    assert asked["path"] == Path(f"{kind}-planted_frameworks-py-tiny.json")
    assert [(case.batch, case.mode, case.threads) for case in asked["cases"]] == [
        (1, "training", 3),
        (8, "training", 3),
    ]
    assert asked["limits"].memory_bytes == 2 << 30
    assert "batch" not in asked["request"]  # a run goes on with others
    if kind == "compare":
        assert [entry.id for entry in asked["entries"]] == ["torch", "convoy"]
    assert "</html>" in (tmp_path / "page.html").read_text()
    assert f"run:       {asked['path']}" in done.output


def test_the_run_as_csv_keeps_to_the_results_columns_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.compare import compare as bench
    from bench.shared import record, svg

    run = compare_run()
    rows = [row for row in run.rows if row.ok]
    path = bench.record(run, rows, "compare", tmp_path).write()
    lines = path.read_text().splitlines()
    assert lines[0].split(",") == list(record.COLUMNS)
    assert len(lines) == 1 + 3 * 5
    assert {bench.provider(row) for row in rows} <= {*svg.PEERS, "convoy"}
    assert any(",torch.eager.nhwc,latency_ms,ms,30," in line for line in lines)
    write(run, tmp_path / "run.json")
