"""Ctrl-C at any moment: exit code 130, and one line that says what is kept; the measurements are kept and used.

Amid measuring, `convoy optimize` then finishes with the best so far; a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from convoy import plan as plans
from convoy.perfdb import Database
from convoy.training.trainer.checkpoint import FORMAT
from convoy.zoo.checksummed_file import read_checksummed
from tests.e2e import planted
from tests.e2e.command import NET, summary, without_progress
from tests.e2e.forked import joined, start
from tests.e2e.forked import wait_for as wait_in

pytestmark = pytest.mark.xdist_group("forked")

MORE = int(os.environ.get("CONVOY_INTERRUPTS", "0"))
"""So many further moments of each command, in processes of their own: a few hundred for a long run."""

WATCHED = (
    NET
    + """
# It notes that it is imported, each forward pass, and each checkpoint, whose writing takes its time.
import time
from pathlib import Path

import safetensors.torch

HERE = Path(__file__).parent
save, forward = safetensors.torch.save_file, Small.forward
(HERE / "imported").touch()


def noted(self, x):
    with (HERE / "passes").open("ab", buffering=0) as file:
        file.write(b".")
    return forward(self, x)


def slow(tensors, path, metadata):
    save(tensors, path, metadata)
    (HERE / f"saving{1 + len(list(HERE.glob('saving*')))}").touch()
    time.sleep(0.02)


Small.forward, safetensors.torch.save_file = noted, slow
"""
)

FORKED = """
import os, sys

for number, name in enumerate(("out", "err"), 1):
    os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
os.chdir(folder)
os.setsid()
os.environ["CONVOY_DB"] = str(folder / "perf.db")
sys.argv = ["convoy", *words]
sys.path.insert(0, str(folder))
from convoy import cli

cli.entry()
"""

TRAIN = (
    "train",
    "net.py:small",
    "--trust",
    "--data",
    "synthetic:16",
    "--batch",
    "8",
    "--size",
    "8",
    "--epochs",
    "100000",
)
COMMANDS = {
    "train": (*TRAIN, "--effort", "none", "--device", "cpu", "--checkpoint", "state"),
    "optimize": (
        "optimize",
        "net.py:small",
        "--trust",
        "--size",
        "16",
        "--device",
        "cpu",
        "--effort",
        "none",
        "--plan",
        "p.json",
    ),
    "run": ("run", "net.py:small", "--trust", "--plan", "given.json", "--size", "16", "--device", "cpu"),
}

WORDS = ("optimize", "net.py:small", "--trust", "--size", "16", "--only-engines", "onednn")


def convoy(
    folder: Path, *words: str, program: tuple[str, ...] = ("-m", "convoy"), **environment: str
) -> subprocess.Popen[str]:
    """The command, in a session of its own as a shell starts it in a process group of its own."""
    given = {**os.environ, "CONVOY_DB": str(folder / "perf.db"), **environment}
    command = [sys.executable, *program, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=given, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it did not come so far in time"
        time.sleep(0.05)


def test_ctrl_c_amid_measuring_gives_the_best_so_far_and_keeps_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    (tmp_path / "p.json").write_text("mine", encoding="utf-8")
    mark = tmp_path / "stalled"
    words = (*WORDS, "--only-engines", "planted.stalls", "--plan", "p.json")
    process = convoy(tmp_path, *words, CONVOY_ENGINES=planted.STALLS, PLANTED_MARK=str(mark))
    try:
        wait_for(mark.exists, process)  # the 3x3 convolution is measured, the 1x1 one is being measured
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "small" in out, err
    assert without_progress(err) == "convoy: interrupted; finishing with the best so far (Ctrl-C again ends at once)\n"
    plan = plans.load(tmp_path / "p.json")
    assert any("measuring ended after" in note and "when it was stopped" in note for note in plan.notes)
    with Database.open(tmp_path / "perf.db", shipped=False) as database:
        kept = database.rows()
        assert database.warnings == []
    assert {row.config.engine for row in kept if "r3s3" in row.problem and row.ok} >= {"aten", "onednn"}
    assert not [row for row in kept if row.config.engine == "planted.stalls"]

    again = convoy(tmp_path, *WORDS, "--json", "s.json")
    out, err = again.communicate(timeout=250)
    assert again.returncode == 0, err
    tuning = summary(tmp_path / "s.json")["tuning"]
    assert tuning["from_database"] >= len([row for row in kept if row.config.engine in ("aten", "onednn")]) > 0
    assert tuning["measured"] > 0
    with Database.open(tmp_path / "perf.db", shipped=False) as database:
        assert set(kept) <= set(database.rows())


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    code = (
        "import os, signal, sys, time\n"
        "from convoy.cli import interrupt\n"
        "interrupt.install()\n"
        "interrupt.keeps(lambda: interrupt.MEASURED)\n"
        "with interrupt.stopped_by(lambda: True):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('goes on', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    process = convoy(tmp_path, program=("-c", code))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == "goes on\n"
    assert err.splitlines() == [
        "convoy: interrupted; finishing with the best so far (Ctrl-C again ends at once)",
        "convoy: interrupted; the measurements are kept in the database",
    ]


def check_ending(folder: Path, code: int | None, err: str) -> None:
    """Exit code 130, one line that is true, no file that is not whole, nothing that goes on."""
    assert code == 130, err
    err = without_progress(err)
    assert err.startswith("convoy: interrupted; "), err
    assert err.count("\n") == 1, err
    assert not [path for path in folder.iterdir() if path.name.startswith((".state", ".p.json"))]
    if (folder / "state").exists():
        state = read_checksummed(folder / "state", FORMAT, "checkpoint", most_bytes=1 << 30)
        assert f"state holds {state['epoch']} epochs and {state['step']} steps; go on with --resume" in err
    if (folder / "p.json").exists():
        plans.load(folder / "p.json")


def passes(folder: Path, count: int) -> Callable[[], bool]:
    return lambda: (folder / "passes").exists() and (folder / "passes").stat().st_size >= count


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for `convoy run`."""
    folder = tmp_path_factory.mktemp("given")
    code = joined(forked(folder, COMMANDS["optimize"]))
    assert code == 0, (folder / "err").read_text()
    return folder / "p.json"


def forked(folder: Path, words: tuple[str, ...]) -> BaseProcess:
    (folder / "net.py").write_text(WATCHED, encoding="utf-8")
    (folder / "forked.py").write_text(FORKED, encoding="utf-8")
    return start(runpy.run_path, str(folder / "forked.py"), {"folder": folder, "words": words})


@pytest.mark.parametrize(
    ("command", "moment", "pause"),
    [
        ("train", "imported", 0.0),
        ("train", "passes1", 0.001),  # the number of classes is asked for
        ("train", "passes2", 0.05),  # the step is captured
        ("train", "saving1", 0.0),
        ("train", "saving9", 0.03),
        ("optimize", "imported", 0.01),
        ("optimize", "passes1", 0.0),
        ("optimize", "passes1", 0.1),
        ("run", "passes1", 0.05),
    ],
)
def test_ctrl_c_at_many_moments(tmp_path: Path, given: Path, command: str, moment: str, pause: float) -> None:
    (tmp_path / "given.json").write_bytes(given.read_bytes())
    process = forked(tmp_path, COMMANDS[command])
    wait_in(passes(tmp_path, int(moment[-1])) if "passes" in moment else (tmp_path / moment).exists, process)
    time.sleep(pause)
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGINT)
    check_ending(tmp_path, joined(process), (tmp_path / "err").read_text())
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.4, 0.9])
def test_ctrl_c_while_libraries_are_imported(tmp_path: Path, seconds: float) -> None:
    """In a process of its own, from the moment on at which there is a handler."""
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    code = "from convoy import cli\ncli.interrupt.install()\nprint('ready', flush=True)\ncli.entry()"
    process = convoy(tmp_path, *COMMANDS["train"], program=("-c", code))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    check_ending(tmp_path, process.returncode, err)


@pytest.mark.skipif(not MORE, reason="CONVOY_INTERRUPTS=N makes N tries of each command")
@pytest.mark.parametrize("command", list(COMMANDS))
@pytest.mark.timeout(0)
def test_ctrl_c_at_random_moments(tmp_path: Path, given: Path, command: str) -> None:
    numbers = random.Random(os.environ.get("CONVOY_SEED", "1"))
    for index in range(MORE):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "net.py").write_text(NET, encoding="utf-8")
        (folder / "given.json").write_bytes(given.read_bytes())
        process = convoy(folder, *COMMANDS[command])
        time.sleep(seconds := numbers.uniform(0.2, 10.0))
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        if process.returncode == 0:  # it had ended
            assert without_progress(err) == ""
            continue
        print(f"{command} after {seconds:.3f} s:\n{err}")
        check_ending(folder, process.returncode, err)
