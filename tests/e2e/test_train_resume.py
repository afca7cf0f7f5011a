"""A training that is killed at any moment, or runs in several processes, goes on as if nothing had been."""

from __future__ import annotations

import random
import runpy
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy import cli
from convoy.training.trainer.checkpoint import FORMAT
from convoy.zoo.checksummed_file import read_checksummed
from tests.e2e.forked import joined, start, wait_for

NET = '''
"""A net with all that a checkpoint must keep; it notes each step. While there is a file `stall`, a checkpoint is half written."""

import time
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

HERE = Path(__file__).parent
save = safetensors.torch.save_file


def halting(tensors, path, metadata):
    save(tensors, path, metadata)
    if (HERE / "stall").exists():
        with Path(path).open("r+b") as file:
            file.truncate(Path(path).stat().st_size // 2)
        (HERE / "stalled").touch()
        time.sleep(3600)


safetensors.torch.save_file = halting


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Linear(8, 5)

    def forward(self, x):
        if self.training:
            with (HERE / "steps").open("ab", buffering=0) as steps:
                steps.write(b".")
        return self.fc(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))


def small():
    torch.manual_seed(0)
    return Small()
'''
pytestmark = pytest.mark.xdist_group("forked")

EPOCHS, STEPS, EVERY = 20, 6, 2
WORDS = (
    "--trust",
    "--data",
    "synthetic:48",
    "--batch",
    "8",
    "--size",
    "10",
    "--lr",
    "0.05",
    "--device",
    "cpu",
    "--stock",
)

PROCESS = '''
"""One of two processes: a training from start to end, and one that is stopped and goes on."""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

from convoy.training.trainer.fit import fit
from convoy.training.trainer.recipe import TrainingRecipe
from convoy.zoo import Preprocessing, load_dataset

dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
images = load_dataset("synthetic:80", preprocessing=Preprocessing(10), classes=5).shard(rank, 2)
recipe = TrainingRecipe(epochs=2, batch=8, stock=True)


class Stopped(Exception):
    pass


def stop(message, done, total):
    if message.startswith("epoch 2/") and done == 3:
        raise Stopped


def draw(*_):
    torch.rand(rank + 1)  # so that each process's generator is elsewhere


def trained(recipe, **words):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(300, 5))
    net.register_forward_pre_hook(draw)
    list(fit(nn.parallel.DistributedDataParallel(net), images, recipe, **words))
    return net.state_dict()


whole = trained(recipe)
recipe = dataclasses.replace(recipe, checkpoint=folder / "state.pt", every=2, resume=True)
try:
    trained(recipe, observer=stop)
except Stopped:
    torch.manual_seed(99)
    torch.save((whole, trained(recipe)), folder / f"{rank}.pt")
dist.destroy_process_group()
'''


class Trainer:
    """`convoy train` in a folder: how many steps it has begun, and where its checkpoint is."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "net.py").write_text(NET, encoding="utf-8")
        self.folder, self.checkpoint = folder, folder / "state.pt"
        self._monkeypatch = monkeypatch

    def go_on(self) -> BaseProcess:
        files = (
            f"{self.folder / 'net.py'}:small",
            "--checkpoint",
            str(self.checkpoint),
            "--db",
            str(self.folder / "db"),
        )
        words = ("convoy", "train", *files, *WORDS, "--epochs", EPOCHS, "--checkpoint-every", EVERY, "--resume")
        self._monkeypatch.setattr(sys, "argv", [str(word) for word in words])  # a forked process is given it
        return start(cli.main)

    def steps(self) -> int:
        path = self.folder / "steps"
        return path.stat().st_size if path.exists() else 0

    def state(self) -> dict[str, Any]:
        return read_checksummed(self.checkpoint, FORMAT, "checkpoint", most_bytes=1 << 30)

    def position(self) -> int:
        """Steps that the checkpoint holds."""
        if not self.checkpoint.exists():
            return 0
        state = self.state()
        return state["epoch"] * STEPS + state["step"]


def killed(trainer: Trainer, process: BaseProcess, moment: Callable[[], bool], pause: float = 0.0) -> None:
    """Kill a training that goes on from its checkpoint, and see that nothing before the last checkpoint is lost."""
    at, before = trainer.position(), trainer.steps()
    wait_for(moment, process)
    time.sleep(pause)
    process.kill()
    assert joined(process) == -signal.SIGKILL
    begun = at + trainer.steps() - before
    assert begun - EVERY <= trainer.position() <= begun


def same(ours: Any, theirs: Any) -> bool:
    """Whether two states are equal to the bit."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def test_killed_at_any_moment_it_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, trainer = (Trainer(tmp_path / name, monkeypatch) for name in ("whole", "killed"))
    assert joined(whole.go_on()) == 0
    assert (whole.steps(), whole.position()) == (EPOCHS * STEPS, EPOCHS * STEPS)

    numbers = random.Random(7)
    for _ in range(3):
        goal, process = trainer.steps() + numbers.randint(1, 10), trainer.go_on()
        killed(trainer, process, lambda goal=goal: trainer.steps() >= goal, numbers.uniform(0, 0.004))

    process = trainer.go_on()
    goal = trainer.steps() + 3
    wait_for(lambda: trainer.steps() >= goal, process)
    (trainer.folder / "stall").touch()
    wait_for((trainer.folder / "stalled").exists, process)
    process.kill()  # in the midst of a file
    assert joined(process) == -signal.SIGKILL
    (trainer.folder / "stall").unlink()
    assert list(trainer.folder.glob(".state.pt.*"))

    assert trainer.position() < EPOCHS * STEPS
    assert joined(trainer.go_on()) == 0
    assert same(trainer.state(), whole.state())
    assert not list(trainer.folder.glob(".state.pt.*"))


def test_each_of_two_processes_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "process.py").write_text(PROCESS, encoding="utf-8")
    both = [start(runpy.run_path, str(tmp_path / "process.py"), {"rank": r, "folder": tmp_path}) for r in range(2)]
    assert [joined(process) for process in both] == [0, 0]
    (whole, resumed), others = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert same(resumed, whole)
    assert all(map(same, others, (whole, resumed)))
    first, second = read_checksummed(tmp_path / "state.pt", FORMAT, "checkpoint", most_bytes=1 << 30)["random"]
    assert not torch.equal(first["cpu"], second["cpu"])
