"""A group's captured collectives are gone before it is shut down: NCCL would wait for them for ever. On a CPU, with gloo."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.training import process_group_shutdown, step_capture
from convoy.training.process_group_shutdown import release_before_shutdown
from convoy.training.step_graph import StepGraph
from tests.unit.program.fake_cuda import install

CPU = torch.device("cpu")


@pytest.fixture
def world() -> Iterator[Any]:
    """A process group of this process, which a test may end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


class Holder:
    """Notes when it lets go."""

    def __init__(self, group: object, told: list[object]) -> None:
        self.group, self.told = group, told

    def release(self) -> None:
        assert dist.is_initialized()
        self.told.append(self)


def test_holders_let_go_before_their_own_group_ends(world: Any):
    part = dist.new_group([0])
    told: list[object] = []
    mine, another, none = Holder(world, told), Holder(part, told), Holder(None, told)
    for holder in (mine, another, none, mine):
        release_before_shutdown(holder)
    dist.destroy_process_group(part)
    assert told == [another]
    dist.destroy_process_group()
    assert told == [another, mine]
    assert not dist.is_initialized()


def test_shutdown_is_wrapped_once_and_keeps_nobody_alive(world: Any):
    told: list[object] = []
    holder = Holder(world, told)
    release_before_shutdown(holder)
    wrapped = dist.ProcessGroup.shutdown
    release_before_shutdown(Holder(world, told))
    assert dist.ProcessGroup.shutdown is wrapped
    assert hasattr(wrapped, process_group_shutdown.MARK)
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None
    dist.destroy_process_group()
    assert told == []


class Graph:
    """Stands for StepGraph: runs the step, and can be let go."""

    def __init__(self, work: Any, example: Any, *_: Any, **__: Any) -> None:
        self.work, self.released = work, False

    def __call__(self, batch: Any, index: int = 0) -> torch.Tensor:
        assert not self.released
        with torch.no_grad():
            return self.work(batch, first=True, last=True)

    def release(self) -> None:
        self.released = True


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


@pytest.mark.parametrize("grouped", [True, False])
def test_a_step_lets_go_of_its_graph_before_its_group_ends(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grouped: bool
):
    settings = convoy.Settings(
        isolate=False, solver="baseline", only_engines=("aten",), effort=convoy.Effort.NONE, db=tmp_path / "perf.db"
    )
    model = nn.parallel.DistributedDataParallel(net()) if grouped else net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(4, 3, 6, 6), torch.arange(4)
    step = convoy.training_step(model, cross_entropy, optimizer, batch, settings=settings)
    monkeypatch.setattr(step_capture, "StepGraph", Graph)
    monkeypatch.setattr(step.guard, "device", torch.device("cuda"))  # so it wants a graph
    step(*batch)
    step(*batch)
    graph = step.graph
    assert isinstance(graph, Graph)
    dist.destroy_process_group()
    assert graph.released is grouped
    assert step.graph is (None if grouped else graph)


def test_a_released_graph_is_reset_behind_its_launches(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch)
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _=None: told.append("synchronize"))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "reset", lambda _: told.append("reset"), raising=False)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = [torch.zeros(1)]
    graph = StepGraph(lambda batch, **_: batch[0], example, list(model.parameters()), optimizer, micro=3)  # type: ignore[arg-type]
    graph(example)
    told.clear()
    graph.release()
    assert told == ["synchronize", "reset", "reset", "reset"]
    with pytest.raises(KeyError):
        graph(example)
