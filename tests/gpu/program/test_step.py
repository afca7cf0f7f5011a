"""training_step on a GPU: one graph, the steps of PyTorch, on one stream and on several, with every option of a step."""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.measurement import task
from convoy.pipeline import train_model, verdict
from convoy.program import updates
from convoy.program.step import TrainingStep
from convoy.program.step_program import StepOptions

pytestmark = pytest.mark.gpu


class Branches(nn.Module):
    """Two inception blocks behind a stem, with batch norms: weight gradients and branches hang off the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        for block in range(2):
            self.add_module(f"a{block}", nn.Conv2d(32, 16, 1))
            self.add_module(f"b{block}", nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), nn.BatchNorm2d(16)))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in range(2):
            x = torch.relu(torch.cat([self.get_submodule(f"{part}{block}")(x) for part in "ab"], 1))
        return self.fc(x.mean((2, 3)))


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("step") / "perf.db"


@pytest.fixture(autouse=True)
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen plan is kept, whatever the clock says; one setting of each engine is measured: a compiler's second each."""
    monkeypatch.setattr(verdict, "is_faster", lambda *_: True)
    monkeypatch.setattr(task, "QUICK_COMPILED", 0)


def net() -> nn.Module:
    torch.manual_seed(1)
    return Branches().cuda().to(memory_format=torch.channels_last)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(8, 3, 24, 24, generator=generator) for _ in range(count)]
    labels = (torch.arange(8) % 10).cuda()
    return [(x.cuda().contiguous(memory_format=torch.channels_last), labels) for x in made]


FEW = ("triton.implicit_gemm", "triton.dgrad", "triton.wgrad")
"""Engines enough for a program of our own kernels; tuning is tested elsewhere, and each more costs a compiler's seconds."""


def settings(db: Path, streams: int = 1) -> convoy.Settings:
    return convoy.Settings(db=db, isolate=False, streams=streams, only_engines=FEW)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_for_which_nothing_is_faster_is_pytorchs_as_one_graph(
    db: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    monkeypatch.setattr(verdict, "is_faster", lambda *_: False)
    model, stock = net(), net()
    ours, theirs = sgd(model), sgd(stock)
    options = {"accumulate": accumulate}
    step = convoy.training_step(model, cross_entropy, ours, batches(1)[0], settings=settings(db), **options)
    assert step.plan.baseline
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index, (x, y) in enumerate(batches(6 * accumulate)):
            loss = step(x, y)
            if index % accumulate == 0:
                theirs.zero_grad()
            wanted = cross_entropy(stock(x), y)
            (wanted / accumulate).backward()
            if index % accumulate == accumulate - 1:
                theirs.step()
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-3, atol=1e-3)
    assert type(step._graph).__name__ == "StepGraph"
    torch.testing.assert_close(weights(model), weights(stock), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("optimizer", [sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("streams", [1, 3])
def test_steps_are_those_of_pytorch(db: Path, optimizer: Callable[[nn.Module], torch.optim.Optimizer], streams: int):
    model, stock = net(), net()
    ours, theirs = optimizer(model), optimizer(stock)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (ours, theirs)]
    step = convoy.training_step(model, cross_entropy, ours, batches(1)[0], settings=settings(db, streams))
    for x, y in batches(8):
        loss = step(x, y)
        theirs.zero_grad()
        wanted = cross_entropy(stock(x), y)
        wanted.backward()
        theirs.step()
        for schedule in schedules:
            schedule.step()
        assert loss.item() == pytest.approx(wanted.item(), rel=2e-2)
    assert step._graph is not None
    assert not [note for note in step.notes if "kernel by kernel" in note]
    assert float((weights(model) - weights(stock)).norm() / weights(stock).norm()) < 5e-3
    assert model.get_submodule("stem.1").num_batches_tracked == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hook": True}, "hooks"),
        ({"adagrad": True}, "Adagrad cannot be captured"),
    ],
)
def test_what_cannot_be_captured_runs_kernel_by_kernel(db: Path, change: dict, words: str):
    model, change = net(), dict(change)
    if change.pop("hook", False):
        model.get_parameter("fc.bias").register_post_accumulate_grad_hook(lambda p: None)
    before = weights(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01) if change.pop("adagrad", False) else sgd(model)
    step = convoy.training_step(model, cross_entropy, optimizer, batches(1)[0], settings=settings(db), **change)
    for x, y in batches(4):
        step(x, y)
    assert step._graph is None
    assert any(words in note for note in step.notes)
    assert not torch.equal(before, weights(model))


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_steps_are_graphs(db: Path, accumulate: int):
    model, stock = net(), net()
    ours, theirs = sgd(model), sgd(stock)
    step = convoy.training_step(
        model, cross_entropy, ours, batches(1)[0], accumulate=accumulate, clip_grad_norm=1.0, settings=settings(db)
    )
    for index, (x, y) in enumerate(batches(4 * accumulate)):
        before = weights(model)
        step(x, y)
        (cross_entropy(stock(x), y) / accumulate).backward()
        if (index + 1) % accumulate:
            assert torch.equal(before, weights(model))
            continue
        torch.nn.utils.clip_grad_norm_(stock.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
    assert step._graph is not None
    assert len(step._graph._graphs) == accumulate
    assert float((weights(model) - weights(stock)).norm() / weights(stock).norm()) < 5e-3


@pytest.mark.parametrize("maker", [sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)], ids=["sgd", "adamw"])
def test_a_scaled_step_is_one_graph_and_skips_what_overflows(
    db: Path, maker: Callable[[nn.Module], torch.optim.Optimizer]
):
    model, stock = net(), net()
    ours, theirs = maker(model), maker(stock)
    scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    step = convoy.training_step(
        model, cross_entropy, ours, batches(1)[0], amp=torch.float16, scaler=scalers[0], settings=settings(db)
    )
    for index, (x, y) in enumerate(batches(8)):
        given = x.clone()
        if index == 4:
            given[0, 0, 0, 0] = float("inf")
        before = weights(model)
        step(given, y)
        theirs.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = cross_entropy(stock(given), y)
        scalers[1].scale(loss).backward()
        scalers[1].step(theirs)
        scalers[1].update()
        assert torch.equal(before, weights(model)) == (index == 4)
        if index == 4:  # the running statistics took the batch in
            for one in (model, stock):
                for name, buffer in one.named_buffers():
                    buffer.copy_(torch.ones_like(buffer) if "running" in name else buffer)
    assert step._graph is not None
    assert scalers[0].get_scale() == scalers[1].get_scale() != 1024.0
    assert float((weights(model) - weights(stock)).norm() / weights(stock).norm()) < 1e-2


def test_options_schedules_and_checkpoints_find_the_optimizer_as_it_was(db: Path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    step = convoy.training_step(model, cross_entropy, optimizer, batches(1)[0], settings=settings(db))
    for x, y in batches(3):
        step(x, y)
    assert step._graph is not None
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == before


def test_a_state_that_is_loaded_is_the_one_that_is_used(db: Path):
    """A checkpoint that is read while the graph is there: its momentum, not that which the graph was captured with."""
    chosen = dataclasses.replace(settings(db), deterministic=True)

    def trained(*, reload: bool) -> torch.Tensor:
        model = net()
        optimizer = sgd(model)
        step = convoy.training_step(model, cross_entropy, optimizer, batches(1)[0], settings=chosen)
        for x, y in batches(3):
            step(x, y)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if reload:
            for x, y in batches(5)[3:]:
                step(x, y)
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        for x, y in batches(5)[3:]:
            step(x, y)
        return weights(model)

    torch.testing.assert_close(trained(reload=True), trained(reload=False), rtol=1e-5, atol=1e-6)


def test_a_graph_outlives_the_thread_that_captured_it(db: Path):
    made: list[TrainingStep] = []
    model = net()

    def tune() -> None:
        step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings(db))
        for x, y in batches(2):
            step(x, y)
        made.append(step)

    thread = threading.Thread(target=tune)
    thread.start()
    thread.join()
    torch.cuda.empty_cache()
    stock = net()
    theirs = sgd(stock)
    held = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    for index, (x, y) in enumerate((*batches(2), *batches(4))):
        if index >= 2:
            made[0](x, y)
        theirs.zero_grad()
        cross_entropy(stock(x), y).backward()
        theirs.step()
    assert len(held) == 8
    assert float((weights(model) - weights(stock)).norm() / weights(stock).norm()) < 5e-3


class Parallel(nn.Module):
    """Three 1x1 convolutions of one input, as inception blocks begin."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.branches = nn.ModuleList(nn.Conv2d(64, k, 1, bias=False) for k in (64, 32, 16))
        self.fc = nn.Linear(112, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        return self.fc(torch.relu(torch.cat([branch(x) for branch in self.branches], 1)).mean((2, 3)))


def test_parallel_convolutions_train_as_one_launch(db: Path):
    torch.manual_seed(1)
    model = Parallel().cuda().to(memory_format=torch.channels_last)
    stock = copy.deepcopy(model)
    ours, theirs = sgd(model), sgd(stock)
    chosen = dataclasses.replace(settings(db), solver="single", only_engines=("triton.merged",))
    step = convoy.training_step(model, cross_entropy, ours, batches(1)[0], amp=torch.bfloat16, settings=chosen)
    assert [s.config.engine for s in step.plan.steps if s.pattern == "merge"] == ["triton.merged"]
    for x, y in batches(6):
        loss = step(x, y)
        theirs.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            wanted = cross_entropy(stock(x), y)
        wanted.backward()
        theirs.step()
        assert loss.item() == pytest.approx(wanted.item(), rel=2e-2)
    assert step._graph is not None
    assert float((weights(model) - weights(stock)).norm() / weights(stock).norm()) < 1e-2


def test_autocast_and_clipping_in_the_graph(db: Path):
    model, stock = net(), net()
    ours, theirs = sgd(model), sgd(stock)
    step = convoy.training_step(
        model, cross_entropy, ours, batches(1)[0], amp=torch.bfloat16, clip_grad_norm=0.5, settings=settings(db)
    )
    for x, y in batches(5):
        loss = step(x, y)
        theirs.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            wanted = cross_entropy(stock(x), y)
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5)
        theirs.step()
        assert loss.item() == pytest.approx(wanted.item(), rel=5e-2)
    assert step._graph is not None


def replayed(db: Path, streams: int, count: int) -> tuple[TrainingStep, torch.Tensor]:
    """Weights after so many steps, which are small enough to go on for long."""
    model = net()
    chosen = dataclasses.replace(settings(db, streams), deterministic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    step = convoy.training_step(model, cross_entropy, optimizer, batches(1)[0], settings=chosen)
    for x, y in batches(4) * (count // 4):  # four batches, over and over
        step(x, y)
    return step, weights(model)


def test_serial_and_parallel_schedules_give_the_same_bits(db: Path):
    _, serial = replayed(db, 1, 8)
    _, parallel = replayed(db, 4, 8)
    assert torch.equal(serial, parallel)


def test_replays_under_memory_pressure_give_the_same_bits(db: Path):
    _, wanted = replayed(db, 4, 10_000)
    assert torch.isfinite(wanted).all()
    stop = threading.Event()

    def press() -> None:
        while not stop.is_set():
            held = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
            del held

    thread = threading.Thread(target=press)
    thread.start()
    try:
        _, found = replayed(db, 4, 10_000)
    finally:
        stop.set()
        thread.join()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("maker", [sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)], ids=["sgd", "adamw"])
def test_early_updates_have_the_bits_of_one_at_the_end(
    db: Path, maker: Callable[[nn.Module], torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(updates, "BUCKET_BYTES", 1 << 10)
    chosen = dataclasses.replace(settings(db, 3), deterministic=True)
    ends: list[torch.Tensor] = []
    for early in (True, False):
        model = net()
        options = StepOptions(early_updates=early)
        step = train_model(model, cross_entropy, maker(model), batches(1)[0], options=options, settings=chosen).step
        for x, y in batches(4) * 10:
            step(x, y)
        assert step._graph is not None, step.notes
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_dropout_draws_new_numbers_in_every_replay(db: Path):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 22 * 22, 10)
    ).cuda()
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = batches(1)[0]
    step = convoy.training_step(model, cross_entropy, frozen, (x, y), settings=settings(db))
    losses = {step(x, y).item() for _ in range(6)}
    assert step._graph is not None, step.notes
    assert len(losses) == 6


def test_another_option_of_the_optimizer_and_moved_parameters_are_captured_anew(db: Path):
    model = net()
    optimizer = sgd(model)
    step = convoy.training_step(model, cross_entropy, optimizer, batches(1)[0], settings=settings(db))
    for x, y in batches(3):
        step(x, y)
    first = step._graph
    optimizer.param_groups[0]["momentum"] = 0.5
    step(*batches(1)[0])
    second = step._graph
    assert second is not first
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    step(*batches(1)[0])
    assert step._graph is not second


def test_a_checkpoint_goes_on_where_it_was(db: Path):
    whole = net()
    optimizer = sgd(whole)
    chosen = dataclasses.replace(settings(db), deterministic=True)
    step = convoy.training_step(whole, cross_entropy, optimizer, batches(1)[0], settings=chosen)
    for x, y in batches(6)[:3]:
        step(x, y)
    kept = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    for x, y in batches(6)[3:]:
        step(x, y)
    resumed = net()
    again = sgd(resumed)
    step = convoy.training_step(resumed, cross_entropy, again, batches(1)[0], settings=chosen)
    resumed.load_state_dict(kept[0])
    again.load_state_dict(kept[1])
    for x, y in batches(6)[3:]:
        step(x, y)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=1e-5, atol=1e-6)


def test_the_timeline_is_the_devices(db: Path):
    model = net()
    result = train_model(model, cross_entropy, sgd(model), batches(1)[0], settings=settings(db, 3))
    assert result.summary is not None
    timeline = result.summary.timeline
    assert len(timeline) == len(result.plan.steps)
    end = max(span.start_us + span.duration_us for span in timeline)
    assert 0 < end < 50_000
    assert {span.stream for span in timeline} == {step.stream for step in result.plan.steps}
