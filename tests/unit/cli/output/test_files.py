"""No output takes the place of a file that the same command reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.cli import app
from convoy.cli.output.files import check_overwrites
from convoy.errors import InputError


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (("optimize", "net.py:small", "--plan", "net.py"), "MODEL"),
        (("optimize", "net.py:small", "--report", "./net.py"), "MODEL"),
        (("optimize", "net.py:small", "--json", "perf.db", "--db", "perf.db"), "--db"),
        (("optimize", "net.py:small", "--input", "a.png", "--profile", "a.png"), "--input"),
        (("export", "net.py:small", "--plan", "net.plan.json", "--out", "net.plan.json"), "--plan"),
        (("compare", "net.py:small", "-o", "net.py"), "MODEL"),
        (("report", "run.json", "-o", "run.json"), "RUNS"),
    ],
)
def test_a_command_does_not_write_over_what_it_reads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    other: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("net.py", "a.png", "net.plan.json", "run.json"):
        Path(name).write_text("kept")
    monkeypatch.setattr("sys.argv", ["convoy", *words])
    assert app.run() == 2
    assert f"expected another file than {other} names" in capsys.readouterr().err
    assert {path.read_text() for path in tmp_path.iterdir()} == {"kept"}


def test_other_files_and_weights_that_are_trained_further_are_outputs(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    path.touch()
    check_overwrites({"--out": path, "--json": True}, {"MODEL": "x" * 5000, "--weights": str(path), "--input": None})
    with pytest.raises(InputError):
        check_overwrites({"--out": path}, {"MODEL": f"{path}:net"})


def test_memory_that_runs_out_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    monkeypatch.setattr(app, "app", fail)
    assert app.run() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("convoy: out of memory: DefaultCPUAllocator")
    assert "--batch" in line
