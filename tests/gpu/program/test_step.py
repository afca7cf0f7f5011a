"""training_step on a GPU: one graph, the steps of PyTorch, on one stream and on several, with every option of a step."""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy import plan as plans
from convoy.pipeline import schedules
from convoy.pipeline.check import end_to_end
from convoy.plan import Plan
from convoy.schedule import parallel_steps
from convoy.training import overlapped_updates, tune_training_step
from convoy.training.step import TrainingStep
from convoy.training.step_program import StepOptions
from tests.gpu.program.branches import FEW, adamw, batches, keep_ours, micro_batches, net, sgd
from tests.gpu.program.judge import Judge

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("step") / "perf.db"


@pytest.fixture(autouse=True)
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_ours(monkeypatch)


def settings(db: Path, streams: int = 1) -> convoy.Settings:
    # On several streams these small nets hold up to 1.5 times the memory, which no user's net would be given unasked.
    return convoy.Settings(db=db, isolate=False, streams=streams, stream_memory=4.0, only_engines=FEW)


def searched(db: Path, streams: int = 1) -> convoy.Settings:
    """The same rows, but never the stored plan of another test: `timeout_s` is part of its key."""
    return dataclasses.replace(settings(db, streams), timeout_s=29.0)


@pytest.fixture(scope="module")
def tuned(db: Path) -> Plan:
    """A plan of the net on one stream that gives the same bits in every run, for the tests that replay it and measure nothing."""
    with pytest.MonkeyPatch.context() as patch:
        keep_ours(patch)
        model = net()
        chosen = dataclasses.replace(settings(db), deterministic=True)
        step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=chosen)
    assert not step.plan.baseline, step.notes
    return step.plan


Spread = Callable[[int], Path]


@pytest.fixture
def on(tuned: Plan, tmp_path: Path) -> Spread:
    """Writes that plan, spread over so many streams, and says where."""

    def write(streams: int) -> Path:
        # As if all launches took equally long: then the net alone decides how they are spread, and not the clock.
        even = [dataclasses.replace(step, median_us=10.0) for step in tuned.steps]
        steps = parallel_steps(even, streams)
        assert {step.stream for step in steps} == set(range(streams))
        path = tmp_path / f"{streams}.plan.json"
        plans.save(dataclasses.replace(tuned, steps=steps), path)
        return path

    return write


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_for_which_nothing_is_faster_is_pytorchs_as_one_graph(
    db: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: False)
    model = net()
    judge = Judge(model, sgd)
    options = {"accumulate": accumulate}
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=searched(db), **options)
    assert step.plan.baseline
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for micro in micro_batches(6, accumulate):
            with judge.step(*micro) as losses:
                losses += [step(x, y) for x, y in micro]
    assert type(step.graph).__name__ == "StepGraph"
    judge.check()


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("streams", [1, 3])
def test_steps_are_those_of_pytorch(
    db: Path, on: Spread, optimizer: Callable[[nn.Module], torch.optim.Optimizer], streams: int
):
    model = net()
    ours, judge = optimizer(model), Judge(model, optimizer)
    rates = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (ours, judge.optimizer)]
    step = convoy.training_step(model, cross_entropy, ours, batches(1)[0], plan=on(streams), settings=settings(db))
    for x, y in batches(8):
        with judge.step((x, y)) as losses:
            losses.append(step(x, y))
        for rate in rates:
            rate.step()
    assert step.graph is not None
    assert not [note for note in step.notes if "kernel by kernel" in note]
    judge.check()
    assert model.get_submodule("stem.1").num_batches_tracked == 8


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01)


def test_an_optimizer_that_cannot_be_captured_runs_kernel_by_kernel(db: Path, on: Spread):
    model = net()
    judge = Judge(model, adagrad)
    step = convoy.training_step(model, cross_entropy, adagrad(model), batches(1)[0], plan=on(1), settings=settings(db))
    for x, y in batches(4):
        with judge.step((x, y)) as losses:
            losses.append(step(x, y))
    assert step.graph is None
    assert any("Adagrad cannot be captured" in note for note in step.notes)
    judge.check()


def test_a_step_with_hooks_runs_kernel_by_kernel_and_calls_them(db: Path, on: Spread):
    model = net()
    judge = Judge(model, sgd)
    bias = model.get_parameter("fc.bias")
    seen: list[torch.Tensor] = []
    bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], plan=on(3), settings=settings(db))
    for count, (x, y) in enumerate(batches(4), 1):
        with judge.step((x, y)) as losses:
            losses.append(step(x, y))
        assert len(seen) == count
        assert torch.equal(seen[-1], bias.grad)
    assert step.graph is None
    assert any("hooks" in note for note in step.notes)
    judge.check()


def test_a_hook_that_comes_after_the_capture_is_called(db: Path, on: Spread):
    model = net()
    judge = Judge(model, sgd)
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], plan=on(3), settings=settings(db))
    for x, y in batches(3):
        with judge.step((x, y)) as losses:
            losses.append(step(x, y))
    assert step.graph is not None
    weight = model.get_parameter("fc.weight")
    seen: list[torch.Tensor] = []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for x, y in batches(5)[3:]:
        with judge.step((x, y)) as losses:
            losses.append(step(x, y))
        assert torch.equal(seen[-1], weight.grad)
    assert len(seen) == 2
    assert any("hooks" in note for note in step.notes)
    judge.check()
    weight.register_hook(lambda gradient: gradient * 0.5)
    step(*batches(1)[0])
    assert torch.equal(seen[-1] * 0.5, weight.grad)


CLIP = 0.1
"""The joint norm of the net's gradients is 0.3 to 0.4, so this clips every step; the judge makes sure."""


@pytest.mark.parametrize(("accumulate", "clip"), [(2, None), (3, CLIP)])
def test_accumulated_steps_are_graphs(db: Path, on: Spread, accumulate: int, clip: float | None):
    """Once without clipping, which would undo a factor that all gradients have in common."""
    model = net()
    judge = Judge(model, sgd, clip=clip)
    options = {"accumulate": accumulate, "clip_grad_norm": clip, "plan": on(1), "settings": settings(db)}
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], **options)
    for micro in micro_batches(4, accumulate):
        with judge.step(*micro) as losses:
            for index, (x, y) in enumerate(micro, 1):
                before = weights(model)
                losses.append(step(x, y))
                assert torch.equal(before, weights(model)) == (index < accumulate)
    assert step.graph is not None
    assert len(step.graph._graphs) == accumulate
    judge.check()


@pytest.mark.parametrize("maker", [sgd, adamw])
def test_a_scaled_step_is_one_graph_and_skips_what_overflows(
    db: Path, maker: Callable[[nn.Module], torch.optim.Optimizer]
):
    model, stock = net(), net()
    ours, theirs = maker(model), maker(stock)
    scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    judge = Judge(model, maker, amp=torch.float16, scaler=scalers[0])
    step = convoy.training_step(
        model, cross_entropy, ours, batches(1)[0], amp=torch.float16, scaler=scalers[0], settings=settings(db)
    )
    assert not step.plan.baseline, step.notes
    for index, (x, y) in enumerate(batches(8)):
        given = x.clone()
        if index == 4:
            given[0, 0, 0, 0] = float("inf")
        before = weights(model)
        if index == 4:
            step(given, y)
        else:
            with judge.step((given, y)) as losses:
                losses.append(step(given, y))
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
    assert step.graph is not None
    assert scalers[0].get_scale() == scalers[1].get_scale() != 1024.0
    judge.check()


def test_options_schedules_and_checkpoints_find_the_optimizer_as_it_was(db: Path, on: Spread):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    step = convoy.training_step(model, cross_entropy, optimizer, batches(1)[0], plan=on(1), settings=settings(db))
    for x, y in batches(3):
        step(x, y)
    assert step.graph is not None
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == before


def test_a_state_that_is_loaded_is_the_one_that_is_used(db: Path, on: Spread):
    """A checkpoint that is read while the graph is there: its momentum, not that which the graph was captured with."""
    plan = on(1)

    def trained(*, reload: bool) -> torch.Tensor:
        model = net()
        optimizer = sgd(model)
        step = convoy.training_step(model, cross_entropy, optimizer, batches(1)[0], plan=plan, settings=settings(db))
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


def test_a_graph_outlives_the_thread_that_captured_it(db: Path, on: Spread):
    model = net()
    judge, plan = Judge(model, sgd), on(3)
    made: list[TrainingStep] = []

    def train(count: int) -> None:
        for x, y in batches(count):
            with judge.step((x, y)) as losses:
                losses.append(made[0](x, y))

    def begin() -> None:
        options = {"plan": plan, "settings": settings(db)}
        made.append(convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], **options))
        train(2)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert made[0].graph is not None
    torch.cuda.empty_cache()
    held = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    train(4)
    assert len(held) == 8
    judge.check()


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
    judge = Judge(model, sgd, amp=torch.bfloat16)
    chosen = dataclasses.replace(settings(db), solver="single", only_engines=("triton.merged",))
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], amp=torch.bfloat16, settings=chosen)
    assert [s.config.engine for s in step.plan.steps if s.pattern == "merge"] == ["triton.merged"]
    for x, y in batches(6):
        with judge.step((x, y)) as losses:
            losses.append(step(x, y))
    assert step.graph is not None
    judge.check()


def test_autocast_and_clipping_in_the_graph(db: Path):
    model = net()
    judge = Judge(model, sgd, amp=torch.bfloat16, clip=CLIP)
    options = {"amp": torch.bfloat16, "clip_grad_norm": CLIP, "settings": settings(db)}
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], **options)
    assert not step.plan.baseline, step.notes
    for x, y in batches(5):
        with judge.step((x, y)) as losses:
            losses.append(step(x, y))
    assert step.graph is not None
    judge.check()


@contextmanager
def pressure() -> Iterator[None]:
    """Other work that allocates, writes and frees all the time, on a stream of its own, so that nothing orders it.

    A stream's allocator hands out what was freed on that stream alone. So what nobody holds goes back to the driver, from which
    the other stream has it: at first, and again and again.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stop = threading.Event()
    rounds: list[int] = []

    def press() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                held = [
                    torch.full((1 << size,), float("nan"), device="cuda") for size in (8, 14, 18, 22) for _ in range(4)
                ]
                torch.cuda.current_stream().synchronize()
                rounds.append(len(held))
                del held
                if len(rounds) % 256 == 0:
                    torch.cuda.empty_cache()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert len(rounds) > 10


def replayed(db: Path, plan: Path, count: int, *, pressed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each of so many steps, which are small enough to go on for long, and the weights after them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    step = convoy.training_step(model, cross_entropy, optimizer, batches(1)[0], plan=plan, settings=settings(db))
    given = batches(4)  # four batches, over and over
    losses = [step(*given[index]) for index in range(2)]
    assert step.graph is not None, step.notes
    with pressure() if pressed else nullcontext():
        losses += [step(*given[index % 4]) for index in range(2, count)]
        torch.cuda.synchronize()
    return torch.stack(losses), weights(model)


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_serial_and_parallel_schedules_give_the_same_bits(db: Path, on: Spread, streams: int):
    serial, spread = replayed(db, on(1), 40), replayed(db, on(streams), 40)
    assert all(torch.equal(one, other) for one, other in zip(serial, spread, strict=True))


def test_replays_under_memory_pressure_give_the_same_bits(db: Path, on: Spread):
    """Every step's loss is compared: what one replay has read wrong, the next may read right again."""
    wanted = replayed(db, on(1), 10_000)
    assert all(bool(torch.isfinite(one).all()) for one in wanted)
    assert len(wanted[0].unique()) > 4  # it trains: the losses of a batch differ from round to round
    found = replayed(db, on(4), 10_000, pressed=True)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("maker", [sgd, adamw])
def test_early_updates_have_the_bits_of_one_at_the_end(
    db: Path, on: Spread, maker: Callable[[nn.Module], torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(overlapped_updates, "BUCKET_BYTES", 1 << 10)
    captured: list[int] = []
    end = overlapped_updates.OverlappedUpdates.end

    def ended(self: overlapped_updates.OverlappedUpdates) -> None:
        captured.append(len(self._buckets))
        end(self)

    monkeypatch.setattr(overlapped_updates.OverlappedUpdates, "end", ended)
    plan, ends = on(3), []
    for early in (True, False):
        model = net()
        options = StepOptions(early_updates=early)
        made = tune_training_step(
            model, cross_entropy, maker(model), batches(1)[0], options=options, plan=plan, settings=settings(db)
        )
        losses = [made.step(x, y) for x, y in batches(4) * 10]
        assert made.step.graph is not None, made.step.notes
        ends.append((torch.stack(losses), weights(model)))
        assert len(captured) == 1  # early updates were captured to their end, and late ones do not go through them
    assert captured[0] > 3
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


class Dropped(nn.Module):
    """Dropout on images, whose mask is drawn in the order in which they lie in memory, and then on vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 8, 3), nn.Dropout(0.5)
        self.one, self.two = nn.Linear(8 * 22 * 22, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.conv(x))).flatten(1)
        return self.two(self.drop(torch.relu(self.one(x))))


def test_dropout_draws_the_numbers_of_pytorchs_step_in_every_replay(db: Path):
    """Losses by another seed differ from these by percents (0.014 to 0.07 on a CPU)."""

    def losses(step: Callable[..., torch.Tensor], seeds: dict[int, int]) -> list[float]:
        found = []
        for index, (x, y) in enumerate(batches(7)):
            if index in seeds:
                torch.manual_seed(seeds[index])
            found.append(step(x, y).item())
        return found

    def stock_losses(seeds: dict[int, int]) -> list[float]:
        stock = copy.deepcopy(model)
        theirs = sgd(stock)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            theirs.zero_grad()
            loss = cross_entropy(stock(x), y)
            loss.backward()
            theirs.step()
            return loss.detach()

        return losses(step, seeds)

    torch.manual_seed(1)
    model = Dropped().cuda().to(memory_format=torch.channels_last)
    seeds = {0: 7, 4: 11}  # the first step is no graph yet; the second seed comes when it has been there for long
    wanted, others = stock_losses(seeds), stock_losses({0: 8, 4: 12})
    assert max(abs(other / one - 1) for one, other in zip(wanted, others, strict=True)) > 1e-2
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings(db))
    assert not step.plan.baseline, step.notes
    assert len([one for one in step.plan.steps if one.pattern == "draw"]) == 2
    assert losses(step, seeds) == pytest.approx(wanted, rel=4e-3)
    assert step.graph is not None, step.notes


def test_another_option_of_the_optimizer_and_moved_parameters_are_captured_anew(db: Path, on: Spread):
    model = net()
    optimizer = sgd(model)
    step = convoy.training_step(model, cross_entropy, optimizer, batches(1)[0], plan=on(1), settings=settings(db))
    for x, y in batches(3):
        step(x, y)
    first = step.graph
    optimizer.param_groups[0]["momentum"] = 0.5
    step(*batches(1)[0])
    second = step.graph
    assert second is not first
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    step(*batches(1)[0])
    assert step.graph is not second


def test_a_checkpoint_goes_on_where_it_was(db: Path, on: Spread):
    whole = net()
    optimizer = sgd(whole)
    options = {"plan": on(1), "settings": settings(db)}
    step = convoy.training_step(whole, cross_entropy, optimizer, batches(1)[0], **options)
    for x, y in batches(6)[:3]:
        step(x, y)
    kept = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    for x, y in batches(6)[3:]:
        step(x, y)
    resumed = net()
    again = sgd(resumed)
    step = convoy.training_step(resumed, cross_entropy, again, batches(1)[0], **options)
    resumed.load_state_dict(kept[0])
    again.load_state_dict(kept[1])
    for x, y in batches(6)[3:]:
        step(x, y)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=1e-5, atol=1e-6)


def test_the_timeline_is_the_devices(db: Path, monkeypatch: pytest.MonkeyPatch):
    # What launches take of the device is not seen: else the last schedule to be tried might hold all but one stream back.
    monkeypatch.setattr(schedules, "_shares", lambda _: ())
    model = net()
    result = tune_training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=searched(db, 3))
    assert not result.plan.baseline, result.plan.notes
    streams = {step.stream for step in result.plan.steps}
    assert len(streams) > 1, result.plan.notes
    assert result.summary is not None
    timeline = result.summary.timeline
    assert len(timeline) == len(result.plan.steps)
    end = max(span.start_us + span.duration_us for span in timeline)
    assert 0 < end < 50_000
    assert {span.stream for span in timeline} == streams
    judge = Judge(model, sgd)
    for x, y in batches(4):
        with judge.step((x, y)) as losses:
            losses.append(result.step(x, y))
    assert result.step.graph is not None, result.step.notes
    judge.check()
