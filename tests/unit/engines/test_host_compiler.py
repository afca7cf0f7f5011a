"""The host compiler's cache: what is compiled runs, what was damaged is compiled again, what is refused says why."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch

from convoy.engines import host_compiler
from convoy.engines.host_compiler import compile_shared, is_whole, load_shared
from convoy.errors import CompileError

needs_compiler = pytest.mark.skipif(not host_compiler.compiler(), reason="no C compiler")

ANSWER = "int answer(void) { return ANSWER; }"
THREADS = """#include <omp.h>
int threads(void) { int n = 0;
#pragma omp parallel reduction(+ : n)
n += 1;
return n; }"""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(host_compiler, "compiled_folder", lambda: tmp_path)
    return tmp_path


@needs_compiler
def test_a_source_is_compiled_once_for_its_flags():
    first, other = (compile_shared(ANSWER, ["-O1", f"-DANSWER={n}"], "test.answer") for n in (42, 43))
    assert (load_shared(first).answer(), load_shared(other).answer()) == (42, 43)
    before = first.stat().st_ino
    assert compile_shared(ANSWER, ["-O1", "-DANSWER=42"], "test.answer").stat().st_ino == before
    assert first.name.startswith("test.answer-")


@needs_compiler
@pytest.mark.parametrize("harm", ["cut", "changed", "emptied", "appended"])
def test_a_damaged_library_is_compiled_again(harm, folder):
    path = compile_shared(ANSWER, ["-DANSWER=1"], "test.answer")
    content = path.read_bytes()
    half = len(content) // 2
    changed = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
    path.write_bytes({"cut": content[:half], "changed": changed, "emptied": b"", "appended": content + b"x"}[harm])
    assert not is_whole(path)
    assert compile_shared(ANSWER, ["-DANSWER=1"], "test.answer") == path
    assert is_whole(path)
    assert [p.name for p in folder.iterdir()] == [path.name], "nothing half made is left"


@needs_compiler
def test_what_the_compiler_says_is_in_the_error(folder):
    with pytest.raises(CompileError) as caught:
        compile_shared("int f(void) { return missing; }", [], "test.wrong")
    assert "missing" in caught.value.log
    assert list(folder.iterdir()) == []


@needs_compiler
@pytest.mark.skipif(not host_compiler._openmp(), reason="this PyTorch has no OpenMP")
def test_kernels_run_on_the_threads_of_torch():
    library = load_shared(compile_shared(THREADS, ["-fopenmp"], "test.threads"))
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert library.threads() == count
    finally:
        torch.set_num_threads(before)
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {os.path.realpath(line.split()[-1]) for line in lines if "libgomp" in line}
    assert os.path.realpath(host_compiler._openmp()) in loaded


def test_without_a_compiler_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(host_compiler, "compiler", lambda: "")
    support = host_compiler.compiler_support()
    assert not support
    assert "C compiler" in support.reason
    with pytest.raises(CompileError, match="C compiler"):
        compile_shared(ANSWER, [], "test.answer")


@needs_compiler
def test_a_compiler_that_never_ends_is_given_up(monkeypatch, folder):
    def hang(command, **kwargs):
        raise subprocess.TimeoutExpired(command, kwargs["timeout"])

    host_compiler._identity(host_compiler.compiler())
    monkeypatch.setattr(host_compiler.subprocess, "run", hang)
    with pytest.raises(CompileError, match="end"):
        compile_shared(ANSWER, ["-DANSWER=7"], "test.answer")
    assert list(folder.iterdir()) == []


@needs_compiler
def test_a_cache_that_cannot_be_written_is_replaced_by_a_folder_of_the_process(monkeypatch, tmp_path):
    monkeypatch.undo()
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(host_compiler, "cache_folder", lambda: blocked / "below")
    found = host_compiler.compiled_folder.__wrapped__()
    assert found.is_dir()
    assert not found.is_relative_to(tmp_path)
    found.rmdir()


@needs_compiler
def test_a_cache_without_room_is_said_with_its_folder(monkeypatch, folder):
    def no_room(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", no_room)
    with pytest.raises(CompileError, match=rf"test.answer: .*{folder}") as caught:
        compile_shared(ANSWER, ["-DANSWER=1"], "test.answer")
    assert "No space left" in caught.value.log
    assert not list(folder.iterdir())


def test_a_library_is_opened_by_ctypes(folder):
    if not host_compiler.compiler():
        pytest.skip("no C compiler")
    assert isinstance(load_shared(compile_shared(ANSWER, ["-DANSWER=3"], "test.answer")), ctypes.CDLL)
