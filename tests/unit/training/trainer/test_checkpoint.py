"""Checkpoints: each process finds its own random numbers, a GPU's with them; damaged files and others' change nothing."""

from __future__ import annotations

import copy
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from convoy.errors import InputError
from convoy.training.trainer.checkpoint import (
    FORMAT,
    RandomState,
    TrainingPosition,
    random_state,
    read_checkpoint,
    read_position,
    write_checkpoint,
)
from convoy.zoo.checksummed_file import read_checksummed, write_checksummed
from tests.unit.training.training_nets import net, sgd

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Training(NamedTuple):
    """The training that a checkpoint stores."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler


def training() -> Training:
    model = net()
    optimizer = sgd(model)
    return Training(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8))


def written(path: Path, random: list[RandomState]) -> Path:
    write_checkpoint(path, *training(), TrainingPosition(1, 2), random)
    return path


@pytest.fixture
def states() -> list[RandomState]:
    """Of three processes."""
    return [{"cpu": torch.Generator().manual_seed(rank).get_state()} for rank in range(3)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, torch.Tensor]:
    """The generators of GPUs, as if there were any."""
    found = {GPU: torch.arange(16, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: found[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: found.update({device: state}))
    return found


@pytest.mark.parametrize(("rank", "takes"), [(0, 0), (1, 1), (2, 2), (3, 0)])  # a fourth was not there
def test_each_process_goes_on_with_its_own(tmp_path: Path, states: list[RandomState], rank: int, takes: int) -> None:
    path = written(tmp_path / "state.pt", states)
    assert read_checkpoint(path, *training(), CPU, rank) == TrainingPosition(1, 2)
    assert torch.equal(torch.get_rng_state(), states[takes]["cpu"])


def test_a_gpu_goes_on_where_it_was(tmp_path: Path, gpu: dict[torch.device, torch.Tensor]) -> None:
    there = gpu[GPU]
    state = random_state(GPU)
    path = written(tmp_path / "state.pt", [state])
    gpu[GPU] = torch.zeros(16, dtype=torch.uint8)
    torch.manual_seed(99)
    read_checkpoint(path, *training(), GPU)
    assert torch.equal(gpu[GPU], there)
    assert torch.equal(torch.get_rng_state(), state["cpu"])


def test_from_one_kind_of_device_to_another(tmp_path: Path, gpu: dict[torch.device, torch.Tensor]) -> None:
    there = gpu[GPU]
    of_cpu, of_gpu = (
        written(tmp_path / "cpu.pt", [random_state(CPU)]),
        written(tmp_path / "gpu.pt", [random_state(GPU)]),
    )
    read_checkpoint(of_cpu, *training(), GPU)
    assert gpu[GPU] is there
    gpu.clear()  # no GPU any more
    read_checkpoint(of_gpu, *training(), CPU)
    assert not gpu


def snapshot(trained: Training) -> list[Any]:
    """Everything that a checkpoint may change, as values of its own."""
    values = [trained.model.state_dict(), trained.optimizer.state_dict(), trained.schedule.state_dict()]
    return copy.deepcopy([*values, torch.get_rng_state()])


def same(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def after_a_step() -> Training:
    """With momenta."""
    trained = training()
    trained.model(torch.ones(2, 3, 10, 10)).sum().backward()
    trained.optimizer.step()
    trained.schedule.step()
    return trained


def test_everything_comes_back(tmp_path: Path):
    torch.manual_seed(7)
    trained = after_a_step()
    before = snapshot(trained)
    write_checkpoint(tmp_path / "state", *trained, TrainingPosition(3, 4), [random_state(CPU)])
    torch.manual_seed(8)
    other = training()
    assert read_checkpoint(tmp_path / "state", *other, CPU) == TrainingPosition(3, 4)
    assert same(snapshot(other), before)
    assert read_position(tmp_path / "state") == TrainingPosition(3, 4)


def test_tied_weights_and_other_dtypes_come_back(tmp_path: Path):
    def tied() -> Training:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)).to(torch.bfloat16)
        model[1].weight = model[0].weight
        model.register_buffer("flags", torch.tensor([True, False]))
        model.register_buffer("none", torch.zeros(0, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        return Training(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8))

    trained = tied()
    trained.model(torch.ones(4, 3, dtype=torch.bfloat16)).sum().backward()
    trained.optimizer.step()
    before = snapshot(trained)
    write_checkpoint(tmp_path / "state", *trained, TrainingPosition(0, 1), [random_state(CPU)])
    other = tied()
    read_checkpoint(tmp_path / "state", *other, CPU)
    assert same(snapshot(other), before)


def test_a_file_of_torch_save_is_refused(tmp_path: Path):
    path = tmp_path / "state.pt"
    torch.save({"format": "convoy checkpoint 1", "model": {}}, path)
    with pytest.raises(InputError, match=r"'convoy checkpoint 2'.*keeps no sum"):
        read_checkpoint(path, *training(), CPU)


def loaded(path: Path) -> Any:
    """The content of a file; None where it is refused."""
    try:
        return read_checksummed(path, FORMAT, "checkpoint", most_bytes=1 << 30)
    except InputError:
        return None


def test_no_damage_is_accepted_and_none_changes_anything(tmp_path: Path):
    trained = after_a_step()
    path = tmp_path / "state"
    write_checkpoint(path, *trained, TrainingPosition(3, 4), [random_state(CPU)])
    whole, reader, state, refused = path.read_bytes(), training(), loaded(path), 0
    before, numbers = snapshot(reader), random.Random(5)
    header = 8 + int.from_bytes(whole[:8], "little")
    for index in range(200):
        data = bytearray(whole)
        at = numbers.randrange(header if index % 2 else len(data))
        if index % 5 == 0:
            data = data[:at]
        elif index % 5 == 1:
            data[at : at + 8] = numbers.randbytes(8)
        elif index % 5 == 2:
            data[at:at] = data[at : at + numbers.randrange(1, 40)]
        else:
            data[at] ^= 1 << numbers.randrange(8)
        path.write_bytes(data)
        if same(loaded(path), state):  # a change that changes nothing, such as a blank of the header
            continue
        with pytest.raises(InputError, match=re.escape(str(path))):
            read_checkpoint(path, *reader, CPU)
        assert same(snapshot(reader), before), index
        refused += 1
    assert refused > 150


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s["model"].pop("conv.weight"), "other names"),
        (
            lambda s: s["model"].update({"conv.weight": s["model"]["conv.weight"].half()}),
            "conv.weight is torch.float16",
        ),
        (lambda s: s["model"].update({"conv.weight": 3}), "conv.weight is int"),
        (lambda s: s["optimizer"]["param_groups"].append({}), "another length"),
        (lambda s: s["optimizer"]["param_groups"][0].update(lr="0.1"), "lr is str"),
        (lambda s: s["optimizer"]["param_groups"][0].update(params=[0]), "params"),
        (
            lambda s: s["optimizer"]["state"].update({0: {"momentum_buffer": torch.zeros(3)}}),
            "momentum_buffer of parameter 0",
        ),
        (lambda s: s["optimizer"]["state"].update({99: {}}), "of other parameters"),
        (lambda s: s["optimizer"].update(state=[]), "malformed"),
        (lambda s: s["schedule"].update(T_max=None), "T_max is NoneType"),
        (lambda s: s["schedule"].pop("T_max"), "other names"),
        (lambda s: s["schedule"].update(base_lrs=[0.1, 0.1]), "base_lrs has another length"),
        (lambda s: s.update(epoch=-1), "epoch is no count"),
        (lambda s: s.update(step=2.0), "step is no count"),
        (lambda s: s.update(step=100), "100 steps of an epoch"),
        (lambda s: s.update(random=[]), "random numbers"),
        (lambda s: s["random"][0].update(cpu=torch.zeros(3, dtype=torch.uint8)), "random state of cpu"),
        (lambda s: s["random"][0].update(cpu=torch.zeros_like(s["random"][0]["cpu"])), "random state of cpu"),
        (lambda s: s.update(more=1), "other parts"),
        (lambda s: s.pop("random"), "other parts"),
    ],
)
def test_a_whole_file_of_another_training_changes_nothing(tmp_path: Path, change: Callable[[Any], Any], says: str):
    path = tmp_path / "state"
    write_checkpoint(path, *after_a_step(), TrainingPosition(3, 4), [random_state(CPU)])
    state = read_checksummed(path, FORMAT, "checkpoint", most_bytes=1 << 30)
    change(state)
    write_checksummed(path, FORMAT, state, "checkpoint")  # with the right sum
    reader = training()
    before = snapshot(reader)
    with pytest.raises(InputError, match=says):
        read_checkpoint(path, *reader, CPU, most_step=50)
    assert same(snapshot(reader), before)


def test_files_that_are_too_large_or_no_files_are_refused_at_once(tmp_path: Path):
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, says in ((large, "at most"), (fifo, "regular"), (tmp_path, "regular"), (tmp_path / "none", "read")):
        with pytest.raises(InputError, match=says):
            read_checkpoint(path, *training(), CPU)
        assert read_position(path) is None


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path):
    path = written(tmp_path / "state", [random_state(CPU)])
    before = path.read_bytes()
    model, optimizer, schedule = training()
    schedule.T_max = float("nan")
    with pytest.raises(InputError, match="can be written"):
        write_checkpoint(path, model, optimizer, schedule, TrainingPosition(1, 2), [random_state(CPU)])
    with pytest.raises(InputError, match="a folder that exists"):
        written(tmp_path / "none" / "state", [random_state(CPU)])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
