"""The host compiler's cache: what is compiled runs, what was damaged is compiled again, what is refused says why."""

import ctypes
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from convoy.engines.compilers import host_compiler
from convoy.engines.compilers.host_compiler import compile_shared, is_whole, load_shared
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
    host_compiler.compiler_support()  # the first call compiles a probe, which is not to lie in this folder
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
def test_threads_that_ask_for_one_library_compile_it_once(monkeypatch, tmp_path):
    source, compiled, both = tmp_path / "answer.c", [], threading.Barrier(2)
    source.write_text(ANSWER)
    compile_one = host_compiler.compile_shared

    def slow(*given):
        compiled.append(given)
        time.sleep(0.1)
        return compile_one(*given)

    def ask(_):
        both.wait(60)
        return host_compiler.library(source, ("-DANSWER=5",), "test.once")

    monkeypatch.setattr(host_compiler, "compile_shared", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(ask, range(2))
    assert first is second
    assert first.answer() == 5
    assert len(compiled) == 1


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
@pytest.mark.skipif(not host_compiler.openmp_library(), reason="this PyTorch has no OpenMP")
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
    assert os.path.realpath(host_compiler.openmp_library()) in loaded


def test_without_a_compiler_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(host_compiler, "compiler", lambda: "")
    support = host_compiler.compiler_support()
    assert not support
    assert "C compiler" in support.reason
    with pytest.raises(CompileError, match="C compiler"):
        compile_shared(ANSWER, [], "test.answer")


def fake(tmp_path, text):
    """A compiler that is a shell script."""
    path = tmp_path / "bin" / "cc"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


OUTPUT = 'while [ "$1" != -o ]; do shift; done; '
"""Of a compiler: its next word is the file that it is to write."""

FAKES = {
    "hangs": "sleep 60 & wait",
    "hangs after it answered": 'if [ "$1" = --version ]; then echo cc 1; else sleep 60 & wait; fi',
    "prints bytes that are no UTF-8": "printf 'cc \\377\\376\\033[2J'; exit 1",
    "writes junk": f"{OUTPUT}echo junk > $2",
    "writes nothing": "exit 0",
    "makes a library without the function": f"{OUTPUT}echo 'int other(void) {{ return 1; }}' > $2.c; "
    "REAL -shared -o $2 $2.c",
    "makes a function that gives something else": f"{OUTPUT}echo 'int convoy_probe(int a) {{ return 7; }}' > $2.c; "
    "REAL -shared -o $2 $2.c",
    "is ended by a signal": "kill -9 $$",
}


@needs_compiler
@pytest.mark.parametrize("way", FAKES)
def test_a_compiler_that_does_not_work_is_given_up(monkeypatch, folder, tmp_path, way):
    found = fake(tmp_path, FAKES[way].replace("REAL", host_compiler.compiler()))
    monkeypatch.setattr(host_compiler, "compiler", lambda: found)
    monkeypatch.setattr(host_compiler, "PROBE_TIMEOUT_S", 0.3)
    support = host_compiler.compiler_support()
    assert not support
    assert "does not work" in support.reason
    assert support.reason.isprintable()
    with pytest.raises(CompileError, match="does not work"):
        compile_shared(ANSWER, ["-DANSWER=7"], "test.answer")
    assert not [p for p in folder.iterdir() if p.name != "bin"], "nothing of it is left"


@needs_compiler
def test_compilers_at_work_are_counted_while_they_run(tmp_path):
    go, started = tmp_path / "go", tmp_path / "started"
    found = fake(tmp_path, f"touch {started}; while [ ! -e {go} ]; do sleep 0.01; done")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(host_compiler.run_limited, [found], "test", 60.0)
        while not started.exists():
            time.sleep(0.01)
        assert host_compiler.compilers_at_work() == 1
        go.touch()
        assert run.result() == (0, "")
    assert host_compiler.compilers_at_work() == 0


@needs_compiler
def test_what_a_compiler_started_ends_with_it(monkeypatch, tmp_path):
    mark = tmp_path / "child"
    found = fake(tmp_path, f"sh -c 'echo $$ > {mark}; sleep 60' & wait")
    with pytest.raises(CompileError, match="did not end within"):
        host_compiler.run_limited([found], "test", 1.0)
    state = Path(f"/proc/{mark.read_text().strip()}/stat")

    def ended() -> bool:
        try:
            return state.read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    end = time.monotonic() + 10  # the kernel ends a killed process when it gets to run
    while not ended() and time.monotonic() < end:
        time.sleep(0.05)
    assert ended()


@needs_compiler
def test_a_library_that_lacks_a_function_is_not_kept():
    path = compile_shared(ANSWER, ["-DANSWER=5"], "test.answer")
    opened = load_shared(path)
    with pytest.raises(CompileError, match="no function missing"):
        opened.missing  # noqa: B018
    assert not path.exists()


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
