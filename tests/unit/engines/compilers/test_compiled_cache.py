"""The folder of compiled code: what another user could have put there is not loaded."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from convoy.engines.compilers import compiled_cache, device_binaries, host_compiler
from convoy.engines.compilers.compiled_cache import open_folder, summed, why_not_folder
from convoy.engines.compilers.host_compiler import compile_shared, load_shared

needs_compiler = pytest.mark.skipif(not host_compiler.compiler(), reason="no C compiler")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which root alone can")

NOBODY = 65534


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path):
    """A cache of our own, and nothing remembered of another one."""
    home = tmp_path / "cache"
    home.mkdir()
    monkeypatch.setattr(compiled_cache, "cache_folder", lambda: home)
    compiled_cache.compiled_folder.cache_clear()
    compiled_cache.folder_at.cache_clear()
    yield home
    compiled_cache.compiled_folder.cache_clear()
    compiled_cache.folder_at.cache_clear()


def test_the_folder_is_made_for_the_user_alone(caches: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compiled_cache.compiled_folder()
    assert found == caches / "compiled"
    assert found.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_read_is_closed(caches: Path) -> None:
    (caches / "compiled").mkdir(mode=0o755)
    assert compiled_cache.compiled_folder() == caches / "compiled"
    assert (caches / "compiled").stat().st_mode & 0o777 == 0o700


FOLDERS = {
    "a symbolic link": lambda path, other: path.symlink_to(other),
    "no folder": lambda path, _: path.write_text(""),
    "other users can write": lambda path, _: (path.mkdir(), path.chmod(0o770)),
    "belongs to user 65534": lambda path, _: (path.mkdir(), os.chown(path, NOBODY, NOBODY)),
}


@pytest.mark.parametrize("reason", [pytest.param(r, marks=as_root if "user 6" in r else ()) for r in FOLDERS])
def test_a_folder_that_cannot_be_trusted_is_replaced_by_one_of_the_process(
    reason: str, caches: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    FOLDERS[reason](caches / "compiled", tmp_path / "other")
    with pytest.warns(UserWarning, match=f"convoy: compiled code is not kept in .*{reason}.*XDG_CACHE_HOME") as caught:
        found = compiled_cache.compiled_folder()
    assert caught[0].filename == __file__
    assert not found.is_relative_to(tmp_path / "cache")
    assert found.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "other").iterdir()) == []
    made = []
    for _ in range(2):
        assert device_binaries.cached("test", ("key",), lambda: made.append(1) or b"binary") == b"binary"
    assert made == [1], "it is a cache all the same"
    compiled_cache.remove_private(found, os.getpid())
    assert not found.exists()


def other_users(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def linked(path: Path) -> None:
    real = path.with_name("real")
    path.rename(real)
    path.symlink_to(real)


def writable(path: Path) -> None:
    path.chmod(0o720)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HARMS = [pytest.param(other_users, marks=as_root), linked, writable, fifo]


@needs_compiler
@pytest.mark.parametrize("harm", HARMS)
def test_a_library_that_another_user_could_have_written_is_compiled_again(harm) -> None:
    flags = ["-O1", f"-DNAME={getattr(harm, '__name__', 'param')}"]
    path = compile_shared("int answer(void) { return 42; }", flags, "test.owner")
    path.write_bytes(summed(b"\x7fELF of another user", mark=True))  # with a valid sum
    harm(path)
    assert not host_compiler.is_whole(path)
    assert compile_shared("int answer(void) { return 42; }", flags, "test.owner") == path
    assert path.stat().st_uid == os.geteuid()
    assert not path.is_symlink()
    assert load_shared(path).answer() == 42


@pytest.mark.parametrize("harm", HARMS)
def test_a_binary_that_another_user_could_have_written_is_made_again(harm, caches: Path) -> None:
    device_binaries.cached("test", ("key",), lambda: b"mine")
    (path,) = (caches / "compiled").iterdir()
    path.write_bytes(summed(b"another user's", mark=False))
    harm(path)
    assert device_binaries.cached("test", ("key",), lambda: b"mine") == b"mine"


@needs_compiler
def test_libraries_come_from_the_folder_that_was_checked(caches: Path, tmp_path: Path) -> None:
    """Another folder that takes its place between check and load is not looked at."""
    path = compile_shared("int answer(void) { return 1; }", ["-O1"], "test.swapped")
    evil = compile_shared("int answer(void) { return 666; }", ["-O1"], "test.swapped").read_bytes()
    (caches / "compiled").rename(caches / "before")
    (caches / "compiled").mkdir()
    (caches / "compiled" / path.name).write_bytes(evil)
    assert ctypes.CDLL(str(path)).answer() == 666
    assert load_shared(path).answer() == 1


def test_reasons() -> None:
    assert why_not_folder(Path("/proc/self/exe").lstat()) == "it is a symbolic link"
    assert isinstance(open_folder(Path("/proc/self/none")), str)


def test_threads_that_want_the_same_binary_make_it_once() -> None:
    """The second thread asks while the first one makes it; another key waits for neither."""
    made: list[str] = []
    making, asked = threading.Event(), threading.Event()

    def slowly() -> bytes:
        made.append("same")
        making.set()
        assert asked.wait(60)
        return b"same"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(device_binaries.cached, "test", ("same",), slowly)
        assert making.wait(60)
        second = pool.submit(device_binaries.cached, "test", ("same",), slowly)
        assert device_binaries.cached("test", ("other",), lambda: b"other") == b"other"
        asked.set()
        assert (first.result(60), second.result(60)) == (b"same", b"same")
    assert made == ["same"]
    assert not device_binaries._locks


def test_a_thread_makes_what_another_one_failed_to_make() -> None:
    making, asked = threading.Event(), threading.Event()

    def fails() -> bytes:
        making.set()
        assert asked.wait(60)
        raise RuntimeError("no compiler")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(device_binaries.cached, "test", ("key",), fails)
        assert making.wait(60)
        second = pool.submit(device_binaries.cached, "test", ("key",), lambda: b"made")
        asked.set()
        with pytest.raises(RuntimeError, match="no compiler"):
            first.result(60)
        assert second.result(60) == b"made"
    assert not device_binaries._locks
