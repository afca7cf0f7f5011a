"""convoy db: every command, its help, its JSON, and one clear line with exit code 2 for bad input."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from convoy import cli
from convoy.cli.commands.db import app
from convoy.engines.manifest import MANIFEST, RETIRED
from convoy.perfdb import Database, Measurement, Status, sql
from convoy.perfdb.record import COLUMNS, to_record
from convoy.problem import ConvProblem, EngineConfig, Knobs
from convoy.target import Target

TARGET = Target("cpu", "A made-up CPU", "avx2", 2, 1 << 30, 1 << 20)
COMMANDS = ("info", "list", "export", "import", "merge", "clear")


def row(index: int, engine: str = "aten", **changes: object) -> Measurement:
    problem = ConvProblem(1, 8, 14, 14, 1000 + index, 3, 3).key
    base = Measurement(
        problem, EngineConfig(engine, 1, Knobs.of(block_m=64)), TARGET.digest, "quick-1", Status.OK, 5, 10.0 + index
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


ROWS = [
    row(0),
    row(0, "gemm", median_us=99.0),
    row(1),
    row(2, status=Status.TIMEOUT, median_us=0.0, samples=0, reason="30 s \x1b[31m[red]"),
]


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "perf.db"
    with Database.open(path) as database:
        database.put(ROWS, targets=[TARGET])
    return path


def run(*words: object, answer: str | None = None) -> str:
    """The standard output of a command; it must succeed."""
    done = CliRunner().invoke(app, [*map(str, words)], input=answer, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    """The one line that the whole command line prints for bad input, with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["convoy", "db", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert said.out == ""
    return said.err.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    assert {c.name or c.callback.__name__ for c in app.registered_commands} == set(COMMANDS)  # type: ignore[union-attr]
    text = run(command, "--help")
    assert "--db" in text
    assert len(text.split("Options")[0].strip().splitlines()) >= 2


def test_info(db: Path) -> None:
    text = run("info", "--db", db)
    for word in (str(db), "measurements", "timeout", "gemm", TARGET.digest, TARGET.name):
        assert word in text.replace("\n", "")
    facts = json.loads(run("info", "--db", db, "--json"))
    assert facts["measurements"] == 4
    assert facts["engine"] == {"aten": 3, "gemm": 1}
    assert facts["schema_version"] == sql.SCHEMA_VERSION


def test_list(db: Path) -> None:
    text = run("list", "--db", db)
    assert "4 of 4 rows" in text
    assert "[31m[red]" in text
    assert "\x1b" not in text
    assert json.loads(run("list", "--db", db, "--json")) == [to_record(r) for r in (ROWS[0], ROWS[1], *ROWS[2:])]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("--engine", "gemm"), 1),
        (("--status", "timeout"), 1),
        (("--problem", "k1000"), 2),
        (("--target", TARGET.digest[:4]), 4),
        (("--problem", "no such key"), 0),
        (("--limit", "3"), 3),
        (("--engine", "aten", "--status", "ok", "--limit", "1"), 1),
    ],
)
def test_list_filters(db: Path, words: tuple[str, ...], count: int) -> None:
    found = json.loads(run("list", "--db", db, "--json", *words))
    assert len(found) == count
    assert all(list(record) == list(COLUMNS) for record in found)
    assert f"{count} of" in run("list", "--db", db, *words)


def test_a_table_is_short_and_json_is_whole(db: Path) -> None:
    with Database.open(db) as database:
        database.put([row(index) for index in range(10, 90)])
    assert "50 of 84 rows" in run("list", "--db", db)
    assert len(json.loads(run("list", "--db", db, "--json"))) == 84


@pytest.mark.parametrize("name", ["all.csv", "all.jsonl.gz"])
def test_export_and_import(db: Path, tmp_path: Path, name: str) -> None:
    assert "4 rows written" in run("export", tmp_path / name, "--db", db)
    text = run("import", tmp_path / name, "--db", tmp_path / "new.db")
    assert text.startswith("4 rows taken in")
    with Database.open(tmp_path / "new.db") as database:
        assert database.rows() == [ROWS[0], ROWS[1], *ROWS[2:]]
    facts = json.loads(run("import", tmp_path / name, "--db", tmp_path / "new.db", "--json"))
    assert (facts["measurements"], facts["unchanged"], facts["refused"]) == (0, 4, [])


def test_export_takes_filters_and_overwrites_only_by_force(
    db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "all.csv"
    assert "1 rows written" in run("export", path, "--db", db, "--engine", "gemm")
    before = path.read_bytes()
    assert "--force" in refuse(capsys, monkeypatch, "export", path, "--db", db)
    assert path.read_bytes() == before
    assert "4 rows written" in run("export", path, "--db", db, "--force")


def test_export_in_the_shipped_form(
    db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run("export", tmp_path / "shipped", "--shipped", "--db", db)
    assert f"{TARGET.digest}.rows.gz" in text.replace("\n", "")
    assert (tmp_path / "shipped" / f"{TARGET.digest}.rows.gz").is_file()
    assert "--shipped" in refuse(capsys, monkeypatch, "export", tmp_path, "--shipped", "--engine", "aten", "--db", db)


def test_import_says_what_it_refused(
    db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "all.csv"
    run("export", path, "--db", db)
    path.write_text(path.read_text().replace("99.0", "-99.0").replace(",timeout,", ",bored,"))
    words = ("import", path, "--db", tmp_path / "new.db")
    monkeypatch.setattr(sys, "argv", ["convoy", "db", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = capsys.readouterr()
    assert caught.value.code == 2
    lines = [line for line in said.err.splitlines() if line.startswith(f"{path}:")]
    assert [line.split(":")[1] for line in lines] == ["3", "5"]
    assert "2 malformed" in said.err.splitlines()[-1]
    assert json.loads(run("list", "--db", tmp_path / "new.db", "--json")) == []
    assert "2 rows taken in" in run(*words, "--partial")


def test_merge(db: Path, tmp_path: Path) -> None:
    assert run("merge", db, "--db", tmp_path / "new.db").startswith("4 rows taken in")
    facts = json.loads(run("merge", db, "--db", tmp_path / "new.db", "--json"))
    assert (facts["measurements"], facts["unchanged"], facts["targets"]) == (0, 4, 1)


def test_clear_removes_plans_alone(db: Path) -> None:
    with Database.open(db, shipped=False) as database:
        rows = database.count()
        for key in ("one", "two"):
            database.plans.put(key, "{}")
    assert "2 plans removed" in run("clear", "--db", db, "--plans", answer="y\n")
    assert "0 plans removed" in run("clear", "--db", db, "--plans")
    with Database.open(db, shipped=False) as database:
        assert (database.plans.keys(), database.count()) == ([], rows)


def test_clear_asks_first(db: Path) -> None:
    done = CliRunner().invoke(app, ["clear", "--db", str(db)], input="n\n")
    assert done.exit_code == 1
    assert "Remove 4 rows (everything)" in done.output
    assert json.loads(run("info", "--db", db, "--json"))["measurements"] == 4
    assert "1 rows removed" in run("clear", "--db", db, "--engine", "gemm", answer="y\n")
    assert "0 rows removed" in run("clear", "--db", db, "--engine", "gemm", "--yes")
    assert "3 rows removed" in run("clear", "--db", db, "--yes")
    assert json.loads(run("list", "--db", db, "--json")) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("info",), "--db"),
        (("list", "--status", "bored"), "status"),
        (("list", "--limit", "-1"), "--limit"),
        (("list", "--colour", "blue"), "--colour"),
        (("export", "out.txt"), "out.txt"),
        (("export", "absent/out.csv"), "absent"),
        (("import", "absent.csv"), "absent.csv"),
        (("import", "."), "."),
        (("merge", "absent.db"), "absent.db"),
        (("merge", "noise.db"), "noise.db"),
        (("import", "noise.csv"), "noise.csv"),
        (("clear", "--target", "12", "--yes"), "target"),
        (("clear", "--plans", "--engine", "aten", "--yes"), "--plans"),
        (
            ("clear", "--target", "f" * 16, "--yes"),
            "--target: got 'ffffffffffffffff', expected a target of this database",
        ),
        (
            ("clear", "--engine", "atenn", "--yes"),
            f"--engine: got 'atenn', expected one of {len(MANIFEST) + len(RETIRED)} names. Did you mean aten?",
        ),
        (("list", "--engine", "atenn"), "Did you mean aten?"),
        (("list", "--target", "zz"), "--target: got 'zz', expected a target of this database"),
    ],
)
def test_bad_input_is_one_clear_line(
    db: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("noise.db", "noise.csv"):
        (tmp_path / name).write_bytes(b"\x00\x01noise\n" * 50)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    said = refuse(capsys, monkeypatch, *words, "--db", "absent.db" if words == ("info",) else db)
    assert expected in said.splitlines()[-1]
    assert "Traceback" not in said
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "words", [("import", "rows.csv"), ("merge", "perf.db"), ("clear", "--yes"), ("clear", "--plans", "--yes")]
)
def test_a_change_of_a_file_that_is_not_convoys_is_refused(
    db: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    run("export", "rows.csv", "--db", db)
    Path("net.py").write_text("import torch")
    said = refuse(capsys, monkeypatch, *words, "--db", "net.py")
    assert said.startswith("convoy: --db: got ")
    assert "it is no database" in said
    assert Path("net.py").read_text() == "import torch"


def test_a_fault_of_the_file_is_told_once_and_is_no_failure(db: Path) -> None:
    db.write_bytes(b"noise" * 5000)
    done = CliRunner().invoke(app, ["list", "--json", "--db", str(db)])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == []
    assert done.stderr.count("was damaged") == 1


def test_the_environment_names_the_database_too(db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_DB", str(db))
    assert json.loads(run("info", "--json"))["measurements"] == 4
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "absent.db"))
    assert json.loads(run("info", "--json"))["measurements"] == 0
    assert not (tmp_path / "absent.db").exists()
