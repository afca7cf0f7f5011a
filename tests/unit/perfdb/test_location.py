"""The database's place, with and without platformdirs; file systems that machines share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.errors import InputError
from convoy.perfdb import default_path
from convoy.perfdb.location import cache_folder, checked_path, on_shared_file_system


def test_the_environment_comes_before_the_cache_folder(tmp_path: Path) -> None:
    assert default_path({"CONVOY_DB": str(tmp_path / "x.db")}) == tmp_path / "x.db"
    assert default_path({}) == cache_folder({}) / "perf.db"


def test_without_platformdirs_the_xdg_rule_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/convoy")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == tmp_path / ".cache" / "convoy"
    assert cache_folder({}) == tmp_path / ".cache" / "convoy"


def test_platformdirs_and_the_rule_agree_on_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("platformdirs")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with_library = cache_folder()
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert cache_folder() == with_library


def test_importing_the_package_imports_neither_platformdirs_nor_torch() -> None:
    script = "import convoy.perfdb, convoy.cli.commands.db, sys; print({'platformdirs', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_paths_are_made_absolute_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checked_path(Path("a.db")) == tmp_path / "a.db"
    for wrong in (tmp_path, Path("/dev/null"), Path("a\0"), Path("n" * 300), Path("~nobody-of-this-name/a.db")):
        with pytest.raises(InputError):
            checked_path(wrong)


def test_a_file_that_another_process_makes_meanwhile_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, look = tmp_path / "a.db", Path.stat

    def seen(self: Path, **named: bool) -> os.stat_result:
        try:
            return look(self, **named)
        finally:
            if self == path:
                path.touch()

    monkeypatch.setattr(Path, "stat", seen)
    assert checked_path(path) == path
    assert path.is_file()


@pytest.mark.parametrize(
    ("path", "shared"),
    [("/a", False), ("/home/me/a", True), ("/home/me", True), ("/home", False), ("/home/me/local/a", False),
     ("/home/mea", False), ("/my disk/a", True), ("/fuse/a", True), ("/twice/a", False)],
)  # fmt: skip
def test_the_deepest_mount_decides(tmp_path: Path, path: str, shared: bool) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/root / ext4 rw 0 0\nserver:/me /home/me nfs4 rw 0 0\n/dev/b /home/me/local xfs rw 0 0\nbroken\n"
        "//server/disk /my\\040disk cifs rw 0 0\nx /fuse fuse.sshfs rw 0 0\nx /twice nfs rw 0 0\n/dev/c /twice ext4 rw 0 0\n"
    )
    assert on_shared_file_system(Path(path), mounts) is shared


def test_unknown_mounts_are_taken_for_local(tmp_path: Path) -> None:
    assert on_shared_file_system(tmp_path, tmp_path / "absent") is False
