"""Removing compiled code: its files alone, in a folder that is the user's own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from convoy.cli.commands.db import app
from convoy.engines.compilers import compiled_cache
from convoy.engines.compilers.clear_compiled import UNFINISHED_S, clear_compiled, compiled_code
from convoy.errors import InputError

KEY = "0123456789abcdef01234567"
CODE = (f"cpu.direct-{KEY}.so", f"pruned.c-{KEY}.so", f"triton-{KEY}.cubin")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(compiled_cache, "cache_folder", lambda: tmp_path / "convoy")
    return tmp_path / "convoy" / "compiled"


@pytest.fixture
def filled(folder: Path) -> Path:
    folder.mkdir(parents=True, mode=0o700)
    for name in (*CODE, "notes.txt", "cpu.direct-short.so"):
        (folder / name).write_bytes(bytes(1000))
    (folder.parent / "perf.db").write_bytes(b"rows")
    for name, age_s in (("old", UNFINISHED_S + 60), ("new", 0)):
        unfinished = folder / f".building-{name}"
        unfinished.mkdir()
        (unfinished / "kernel0.o").write_bytes(b"")
        os.utime(unfinished, (time.time() - age_s,) * 2)
    return folder


def test_compiled_code_goes_and_everything_else_stays(filled: Path) -> None:
    assert compiled_code().files == 4
    removed = clear_compiled()
    assert (removed.path, removed.files) == (filled, 4)
    assert removed.size_bytes >= 3000
    assert sorted(path.name for path in filled.iterdir()) == [".building-new", "cpu.direct-short.so", "notes.txt"]
    assert (filled.parent / "perf.db").read_bytes() == b"rows"
    assert clear_compiled().files == 0


def test_where_nothing_was_compiled_no_folder_is_made(folder: Path) -> None:
    assert (compiled_code().files, clear_compiled().files) == (0, 0)
    assert not folder.parent.exists()


def test_nothing_is_removed_through_a_link(filled: Path, folder: Path, tmp_path: Path) -> None:
    filled.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="it is a symbolic link"):
        clear_compiled()
    assert all((tmp_path / "elsewhere" / name).exists() for name in CODE)


def test_the_command_asks_first(filled: Path) -> None:
    refused = CliRunner().invoke(app, ["clear", "--compiled"], input="n\n")
    assert refused.exit_code == 1
    assert "Remove 4 files of compiled code (0.0 MB)" in refused.output
    assert all((filled / name).exists() for name in CODE)
    done = CliRunner().invoke(app, ["clear", "--compiled", "--yes"])
    assert done.exit_code == 0
    assert "4 files of compiled code" in done.output
    assert not any((filled / name).exists() for name in CODE)
    assert "0 files of compiled code" in CliRunner().invoke(app, ["clear", "--compiled"]).output


@pytest.mark.parametrize("words", [("--engine", "aten"), ("--target", "f" * 16), ("--db", "x.db")])
def test_rows_and_compiled_code_are_removed_by_calls_of_their_own(filled: Path, words: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, ["clear", "--compiled", "--yes", *words])
    assert isinstance(done.exception, InputError) or done.exit_code == 2
    assert all((filled / name).exists() for name in CODE)
