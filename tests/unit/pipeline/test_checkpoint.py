"""Checkpoints: each process finds its own random numbers, a GPU's with them; older files can still be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from training_nets import net, sgd

from convoy.pipeline.checkpoint import Position, RandomState, random_state, read_checkpoint, write_checkpoint

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Training(NamedTuple):
    """What a checkpoint is of."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler


def training() -> Training:
    model = net()
    optimizer = sgd(model)
    return Training(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8))


def written(path: Path, random: list[RandomState]) -> Path:
    write_checkpoint(path, *training(), Position(1, 2), random)
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
    assert read_checkpoint(path, *training(), CPU, rank) == Position(1, 2)
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


def test_a_file_of_the_first_process_alone_can_be_read(tmp_path: Path, states: list[RandomState]) -> None:
    path = written(tmp_path / "state.pt", states)
    state: dict[str, Any] = torch.load(path, weights_only=True)
    state["random"] = states[1]["cpu"]  # a tensor, as such files have it
    torch.save(state, path)
    for device, rank in ((CPU, 0), (CPU, 1), (GPU, 0)):
        torch.manual_seed(99)
        assert read_checkpoint(path, *training(), device, rank) == Position(1, 2)
        assert torch.equal(torch.get_rng_state(), states[1]["cpu"])
