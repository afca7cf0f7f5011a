"""Two runs on one device: each finds out, also the one that was there first; on several GPUs all of them are looked at."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.compare.runs import device_lock
from convoy.compare.runs.device_lock import claim, gpus_at_work, noted
from convoy.compare.runs.rows import Row
from convoy.compare.runs.runfile import Run
from convoy.target import Target

CPU = Target("cpu", "Some CPU @ 3", "avx2", 2, 0, 0)
GPU = Target("cuda", "GPU", "sm_90", 1, 0, 0)
CAME = "another run of Convoy came to this {} meanwhile: figures of both are worth little"
THERE = "another run of Convoy is on this {}: figures of both are worth little"


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_lock, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(device_lock, "others_at_work", lambda _: "")
    monkeypatch.setattr(device_lock, "ask_tool", lambda _: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def silent(_: str) -> None:
    """Nobody reads it."""


def test_who_has_the_lock_learns_of_a_run_that_came_and_went(tmp_path: Path) -> None:
    said: list[str] = []
    with claim(CPU, said.append) as first:
        assert first == []
        with claim(CPU, silent) as second:
            assert second == [THERE.format("CPU")]
        assert first == []
        first.look()
        first.look()
        assert first == [CAME.format("CPU")]
    assert first == [CAME.format("CPU")]
    assert said == [f"warning: {CAME.format('CPU')}"]
    with claim(CPU, said.append) as later:  # what was seen is cleared away
        pass
    assert later == []
    assert [path.name for path in tmp_path.iterdir()] == ["compare-cpu-some-cpu-3.lock"]


def test_the_end_of_the_work_is_looked_at_without_being_asked_also_where_it_fails() -> None:
    said: list[str] = []

    def fail() -> None:
        with claim(CPU, said.append), claim(CPU, silent):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert said == [f"warning: {CAME.format('CPU')}"]


def test_a_run_without_the_lock_that_outlives_the_one_that_had_it_is_seen_by_the_next() -> None:
    first, second = claim(CPU, silent), claim(CPU, silent)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with claim(CPU, silent) as third:
        assert third == [THERE.format("CPU")]
        second.__exit__(None, None, None)
    assert third == [THERE.format("CPU")]  # told once
    with claim(CPU, silent) as fourth:
        assert fourth == []


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_in_another_process_is_noted_and_forgotten(tmp_path: Path, killed: bool) -> None:
    code = f"""
        import os
        from pathlib import Path
        from convoy.compare.runs.device_lock import device_lock
        from convoy.target import Target
        with device_lock(Target("cpu", "Some CPU @ 3", "avx2", 2, 0, 0), Path({str(tmp_path)!r})) as warning:
            print(warning, flush=True)
            if {killed}:
                os._exit(9)
    """
    with claim(CPU, silent) as notes:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == THERE.format("CPU"), done.stderr
    assert notes == [CAME.format("CPU")]
    with claim(CPU, silent) as later:
        pass
    assert later == []


def test_on_several_gpus_a_run_on_one_of_them_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    with claim(GPU, silent, count=2) as both:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        with claim(GPU, silent) as one:
            assert one == [THERE.format("CUDA")]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
        with claim(GPU, silent) as other:
            assert other == []
    assert both == [CAME.format("CUDA")]


ANSWER = "0, GPU-aaaa-1, 0\n1, GPU-bbbb-2, 87\n2, GPU-cccc-3, [N/A]\n3, GPU-dddd-4, 40\n"


@pytest.mark.parametrize(
    ("visible", "count", "busy"),
    [
        ("", 1, ""),
        ("", 2, "GPU 1 87 %"),
        ("", 4, "GPU 1 87 %, GPU 3 40 %"),
        ("3,2", 2, "GPU 3 40 %"),
        ("0,2,3", 2, ""),
        ("GPU-aaaa,GPU-bb", 2, "GPU 1 87 %"),
        ("MIG-aaaa", 1, ""),
    ],
)
def test_all_gpus_that_are_used_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int, busy: str
) -> None:
    monkeypatch.setattr(device_lock, "ask_tool", lambda _: ANSWER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    wanted = f"other programs keep busy: {busy}" if busy else ""
    assert gpus_at_work(count) == wanted
    if count > 1:
        with claim(GPU, silent, count=count) as notes:
            assert notes == ([wanted] if wanted else [])


@pytest.mark.parametrize("answer", ["", "nonsense", "0, GPU-a", ", , \n\n"])
def test_where_nvidia_smi_says_nothing_nobody_is_warned(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(device_lock, "ask_tool", lambda _: answer)
    assert gpus_at_work(2) == ""


def test_a_run_takes_the_notes_on_each_once() -> None:
    run = Run("compare", {"notes": ["a"], "date": "d"}, (Row("n", "p"),))
    found = noted(run, ["a", "b"])
    assert found.manifest == {"notes": ["a", "b"], "date": "d"}
    assert found.rows == run.rows
    assert noted(Run("compare", {}), ["b"]).manifest["notes"] == ["b"]


def test_where_no_marker_can_be_left_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    acquire: Callable[..., object] = device_lock.FileLock.acquire

    def unwritable(self: device_lock.FileLock, **words: float) -> object:
        if not self.lock_file.endswith(".lock"):
            raise PermissionError
        return acquire(self, **words)

    with claim(CPU, silent):
        monkeypatch.setattr(device_lock.FileLock, "acquire", unwritable)
        with claim(CPU, silent) as second:
            assert second == [THERE.format("CPU")]
