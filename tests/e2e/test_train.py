"""convoy train and convoy optimize --train; data-parallel training by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy import plan as plans
from tests.e2e.command import Command, summary

NET = (
    "net.py:small",
    "--trust",
)
DATA = ("--data", "synthetic:48", "--batch", "8", "--size", "12", "--lr", "0.05")


def test_train_prints_a_line_an_epoch_and_keeps_plan_and_checkpoint(convoy_command: Command, folder: Path) -> None:
    words = ("--save-plan", "trained.plan.json", "--checkpoint", "trained.pt")
    lines = convoy_command.works("train", *NET, *DATA, "--epochs", "2", "--effort", "none", *words).splitlines()
    assert lines[:2] == [
        "48 training and 48 test images, 3 classes",
        "8 images a step, 6 steps an epoch, learning rate 0.05",
    ]
    assert [line.split(":")[0] for line in lines[2:]] == ["epoch 1 of 2", "epoch 2 of 2"]
    assert "accuracy" in lines[2]
    assert "  lr 0.0" in lines[2]
    assert plans.load(folder / "trained.plan.json").model == "synthetic:48"
    go_on = ("train", *NET, *DATA, "--epochs", "3", "--stock", *words[2:])
    assert "--checkpoint: got 'trained.pt', expected a file that is not there yet" in convoy_command.refused(*go_on)
    again = convoy_command.works(*go_on, "--resume").splitlines()
    assert again[1] == "resumes at epoch 3 of 3, step 0 of 6: 8 images a step, 6 steps an epoch, learning rate 0.0125"
    assert [line.split(":")[0] for line in again[2:]] == ["epoch 3 of 3"]
    done = convoy_command.works(*go_on, "--resume", "--out", "trained.safetensors").splitlines()
    assert done[1:] == [
        "3 of 3 epochs are done; nothing is left to train (--epochs sets how many)",
        "weights: trained.safetensors",
    ]


@pytest.mark.slow
def test_the_command_trains_in_two_processes(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "convoy"]
    words = (
        "train",
        *NET,
        *DATA,
        "--epochs",
        "2",
        "--effort",
        "none",
        "--device",
        "cpu",
        "--db",
        str(folder / "rows.db"),
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *words], cwd=folder, capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert [line.split(":")[0] for line in lines] == ["epoch 1 of 2", "epoch 2 of 2"]  # by one of them


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--batch", "0"), "batch"),
        (("--batch", "4000"), "at most the 48 images"),
        (("--data", "nowhere"), "data"),
        (("--amp", "fp32"), "amp"),
        (("--resume",), "checkpoint"),
        (("--checkpoint", "nowhere/net.pt"), "--checkpoint"),
        (("--epochs", "0"), "epochs"),
        (("--head", "none"), "--head: got 'none', expected one of fit, keep"),
        (("--out", "net.pt"), "a file that ends in .safetensors"),
    ],
)
def test_wrong_words_are_one_line(convoy_command: Command, words: tuple[str, ...], says: str) -> None:
    assert says in convoy_command.refused("train", *NET, *DATA, "--stock", *words)


def test_optimize_train_tunes_all_directions(convoy_command: Command, folder: Path) -> None:
    words = ("--train", "--batch", "4", "--size", "12", "--only-engines", "gemm", "--solver", "baseline")
    convoy_command.works("optimize", *NET, *words, "--json", "step.json", "--plan", "step.plan.json")
    layers = summary(folder / "step.json")["layers"]
    directions = {layer["problem"].split(":")[1] for layer in layers if layer["problem"].startswith("conv:")}
    assert directions == {"fprop", "dgrad", "wgrad"}
    assert plans.load(folder / "step.plan.json").steps


def test_autocast_is_for_training(convoy_command: Command) -> None:
    assert "--train" in convoy_command.refused("optimize", *NET, "--amp", "bf16")
    assert "one of bf16, fp16" in convoy_command.refused("optimize", *NET, "--train", "--amp", "fp8", "--size", "12")


@pytest.mark.slow
def test_two_processes_train_as_one_with_both_halves(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("distributed_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["end"] == second["end"]
    assert first["end"] == first["apart"]  # the same bits, whether gradients travel early or late
    assert first["end"] == first["early"]  # and whether parameters are updated bucket by bucket or at the end
    assert first["plan"] == second["plan"]
    assert first["plan"]
    share = set(second["measured"])
    assert 0 < len(share) < len(first["measured"])  # the first was given what the second measured
    assert share < set(first["measured"])
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), first["start"], strict=True):
            parameter.copy_(torch.tensor(value))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(3, 8, 3, 8, 8, generator=generator), torch.arange(24).reshape(3, 8) % 5
    for index in range(3):
        optimizer.zero_grad()
        cross_entropy(net(x[index]), y[index]).backward()
        optimizer.step()
    for parameter, value in zip(net.parameters(), first["end"], strict=True):
        torch.testing.assert_close(parameter.detach(), torch.tensor(value), rtol=1e-4, atol=1e-5)
