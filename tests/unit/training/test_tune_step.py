"""training_step: the steps of PyTorch, by a plan; every option of a step; what it refuses; one plan for all processes."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy import plan as plans
from convoy.errors import InputError, PlanError, SelectionError
from convoy.measurement import Peaks
from convoy.pipeline.check import end_to_end
from convoy.pipeline.stored_plans import start
from convoy.pipeline.stored_plans.plan_store import FROM_DATABASE, NOT_USED
from convoy.training import TrainingResult, training_job, tune_training_step
from tests.unit.training.training_nets import batches, net, sgd

SETTINGS = convoy.Settings(isolate=False, solver="baseline", only_engines=("aten",))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return dataclasses.replace(SETTINGS, db=tmp_path_factory.mktemp("training") / "perf.db")


@pytest.fixture(scope="module")
def plan(settings: convoy.Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the net, so that the tests measure nothing."""
    model = net()
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings)
    return step.save(tmp_path_factory.mktemp("training") / "net.plan.json")


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "optimizer",
    [sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01)],
    ids=["sgd", "adamw", "rmsprop"],
)
def test_steps_are_those_of_pytorch(plan: Path, optimizer: Callable[[nn.Module], torch.optim.Optimizer]):
    model, stock = net(), net()
    ours, theirs = optimizer(model), optimizer(stock)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (ours, theirs)]
    step = convoy.training_step(model, cross_entropy, ours, batches(1)[0], plan=plan)
    assert step.program.runnable is not None
    for x, y in batches(6):
        loss = step(x, y)
        theirs.zero_grad()
        wanted = cross_entropy(stock(x), y)
        wanted.backward()
        theirs.step()
        for schedule in schedules:
            schedule.step()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-4, atol=1e-5)
        assert not loss.requires_grad
    assert_close(state(model), state(stock))
    assert model.bn.num_batches_tracked == 6


def test_clipping_accumulation_and_a_scaler_are_those_of_pytorch(plan: Path, settings: convoy.Settings):
    model, stock = net(), net()
    ours, theirs = sgd(model), sgd(stock)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    step = convoy.training_step(
        model,
        cross_entropy,
        ours,
        batches(1)[0],
        scaler=scalers[0],
        clip_grad_norm=0.1,
        accumulate=2,
        settings=settings,
    )
    assert step.program.runnable is not None
    for index, (x, y) in enumerate(batches(6)):
        before = state(model)
        step(x, y)
        scalers[1].scale(cross_entropy(stock(x), y) / 2).backward()
        if index % 2 == 0:
            assert torch.equal(before["fc.weight"], model.fc.weight)
            continue
        scalers[1].unscale_(theirs)
        torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.1)
        scalers[1].step(theirs)
        scalers[1].update()
        theirs.zero_grad()
    assert_close(state(model), state(stock))
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_a_step_whose_gradients_overflow_is_skipped(settings: convoy.Settings):
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], scaler=scaler, settings=settings)
    before = model.fc.weight.clone()
    x, y = batches(1)[0]
    x[0, 0, 0, 0] = float("inf")
    step(x, y)
    assert torch.equal(before, model.fc.weight)
    assert scaler.get_scale() == 32


def test_hooks_on_parameters_are_called(plan: Path):
    model, stock = net(), net()
    seen: list[torch.Tensor] = []
    for module in (model, stock):
        module.fc.weight.register_hook(lambda gradient: gradient * 0.5)
        module.fc.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    ours, theirs = sgd(model), sgd(stock)
    step = convoy.training_step(model, cross_entropy, ours, batches(1)[0], plan=plan)
    x, y = batches(1)[0]
    step(x, y)
    cross_entropy(stock(x), y).backward()
    theirs.step()
    assert_close(state(model), state(stock))
    assert len(seen) == 2
    torch.testing.assert_close(*seen)


def test_a_hook_that_returns_what_it_must_not_is_refused_as_by_autograd(plan: Path):
    model = net()
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], plan=plan)
    model.fc.bias.register_post_accumulate_grad_hook(lambda p: p.grad)
    with pytest.raises(RuntimeError, match="post accumulate grad hooks should return None"):
        step(*batches(1)[0])


def test_a_checkpoint_resumes_where_it_was(plan: Path):
    whole = net()
    optimizer = sgd(whole)
    step = convoy.training_step(whole, cross_entropy, optimizer, batches(1)[0], plan=plan)
    for x, y in batches(4)[:2]:
        step(x, y)
    kept = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    for x, y in batches(4)[2:]:
        step(x, y)
    resumed = net()
    again = sgd(resumed)
    step = convoy.training_step(resumed, cross_entropy, again, batches(1)[0], plan=plan)
    resumed.load_state_dict(kept[0])
    again.load_state_dict(kept[1])
    for x, y in batches(4)[2:]:
        step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_another_batch_runs_the_stock_step_with_one_warning(plan: Path):
    model, stock = net(), net()
    ours, theirs = sgd(model), sgd(stock)
    step = convoy.training_step(model, cross_entropy, ours, batches(1)[0], plan=plan)
    with pytest.warns(UserWarning, match="no plan for this batch"):
        step(*batches(1, n=2)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*batches(1, n=2)[0])
    for _ in range(2):
        theirs.zero_grad()
        x, y = batches(1, n=2)[0]
        cross_entropy(stock(x), y).backward()
        theirs.step()
    assert_close(state(model), state(stock))


def test_a_changed_mode_runs_the_stock_step(plan: Path):
    model = net()
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], plan=plan)
    model.bn.eval()
    mean = model.bn.running_mean.clone()
    with pytest.warns(UserWarning, match="training flag of .* was changed"):
        step(*batches(1)[0])
    assert torch.equal(mean, model.bn.running_mean)


def test_dropout_follows_the_seed(settings: convoy.Settings):
    def losses() -> list[float]:
        model = net(0.5)
        step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings)
        torch.manual_seed(7)
        return [float(step(x, y)) for x, y in batches(4)]

    stock = net(0.5)
    optimizer = sgd(stock)
    torch.manual_seed(7)
    wanted: list[float] = []
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = cross_entropy(stock(x), y)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert losses() == pytest.approx(wanted, rel=1e-4)


class Images(nn.Module):
    """Dropout on images: a mask is drawn in the order in which the values lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(nn.functional.dropout(torch.relu(self.conv(x)), 0.5, self.training).mean((2, 3)))


def test_dropout_of_channels_last_images_is_that_of_pytorch(settings: convoy.Settings):
    torch.manual_seed(1)
    model = Images()
    x, y = batches(1)[0]
    batch = (x.to(memory_format=torch.channels_last), y)
    result = tune_training_step(model, cross_entropy, sgd(model), batch, settings=settings)
    assert not result.plan.baseline, result.plan.notes
    (layout,) = {one.layout for one in result.plan.steps if one.pattern == "draw"}
    assert layout == "nhwc"


def test_autocast_trains_in_bf16(settings: convoy.Settings):
    model, stock = net(), net()
    ours, theirs = sgd(model), sgd(stock)
    step = convoy.training_step(model, cross_entropy, ours, batches(1)[0], amp=torch.bfloat16, settings=settings)
    assert any(".bf16." in s.problem for s in step.plan.steps)
    for x, y in batches(3):
        theirs.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            wanted = cross_entropy(stock(x), y)
        wanted.backward()
        theirs.step()
        assert step(x, y).item() == pytest.approx(wanted.item(), rel=0.03)


def test_a_step_that_is_not_faster_is_the_stock_one(settings: convoy.Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(end_to_end, "is_faster", lambda result, baseline: False)
    model = net()
    chosen = dataclasses.replace(settings, solver="exact")
    result = tune_training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=chosen)
    assert result.plan.baseline
    assert "not faster in four of five rounds" in result.plan.notes[-1]
    assert result.summary.speedup == 1
    before = model.fc.weight.clone()
    result.step(*batches(1)[0])
    assert not torch.equal(before, model.fc.weight)


def test_a_step_whose_gradients_are_wrong_as_a_whole_is_the_stock_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(end_to_end, "is_faster", lambda result, baseline: True)
    right = end_to_end.errors_against
    calls: list[int] = []

    def planted(outputs: Any, exact: Any) -> end_to_end.OutputErrors:
        calls.append(1)
        return right(outputs, exact) if len(calls) % 2 else end_to_end.OutputErrors(0.5, 0.5)

    monkeypatch.setattr(end_to_end, "errors_against", planted)
    model = net()
    chosen = dataclasses.replace(SETTINGS, solver="exact", db=tmp_path / "perf.db")
    result = tune_training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=chosen)
    assert result.plan.baseline
    assert "gradients' error of 5.00e-01" in result.plan.notes[-1]


class Reordered(nn.Module):
    """Reads its channels by index: their gradients are summed up in any order, on CPUs too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.register_buffer("order", torch.tensor([0, 2, 2, 1, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)[:, self.order].mean((2, 3))


def reordered(settings: convoy.Settings) -> TrainingResult:
    torch.manual_seed(1)
    model = Reordered()
    chosen = dataclasses.replace(settings, solver="exact", deterministic=True)
    return tune_training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=chosen)


def test_a_steady_step_that_is_not_faster_is_kept_where_pytorchs_own_may_differ(
    settings: convoy.Settings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(end_to_end, "is_faster", lambda result, baseline: False)
    result = reordered(settings)
    assert not result.plan.baseline
    assert result.step.program.runnable is not None
    assert "not faster in four of five rounds, but kept" in result.plan.notes[-1]
    assert "index_put.default may give different bits from run to run" in result.plan.notes[-1]


def test_a_steady_step_that_is_not_faster_is_the_stock_one_where_that_is_steady_too(
    settings: convoy.Settings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(end_to_end, "is_faster", lambda result, baseline: False)
    model = net()
    chosen = dataclasses.replace(settings, solver="exact", deterministic=True)
    assert tune_training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=chosen).plan.baseline


def test_a_steady_step_with_wrong_gradients_is_refused_where_pytorchs_own_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    right = end_to_end.errors_against
    calls: list[int] = []

    def planted(outputs: Any, exact: Any) -> end_to_end.OutputErrors:
        calls.append(1)
        return right(outputs, exact) if len(calls) % 2 else end_to_end.OutputErrors(0.5, 0.5)

    monkeypatch.setattr(end_to_end, "errors_against", planted)
    with pytest.raises(SelectionError, match=r"gradients' error of 5\.00e-01.*may give different bits from run to run"):
        reordered(dataclasses.replace(SETTINGS, db=tmp_path / "perf.db"))


def test_the_timeline_holds_every_step_in_order(settings: convoy.Settings):
    model = net()
    summary = tune_training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings).summary
    assert len(summary.timeline) == len([layer for layer in summary.layers if layer.engine])
    starts = [span.start_us for span in summary.timeline]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert all(span.duration_us > 0 for span in summary.timeline)
    assert summary.schedule.critical_us < summary.schedule.serial_us
    assert {span.critical for span in summary.timeline} == {True, False}


def test_the_summary_holds_all_three_directions(settings: convoy.Settings):
    model = net()
    summary = tune_training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings).summary
    assert summary.batch == 4
    directions = {layer.problem.split(":")[1] for layer in summary.layers if layer.problem.startswith("conv:")}
    assert directions == {"fprop", "dgrad", "wgrad"}
    assert all(layer.baseline_us > 0 for layer in summary.layers if layer.engine)
    assert summary.rel_l2_error < 1e-5


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"batch": [1, 2]}, InputError, "batch: got 'no tensor'"),
        ({"batch": ()}, InputError, "batch"),
        ({"accumulate": 0}, InputError, "accumulate"),
        ({"clip_grad_norm": -1.0}, InputError, "clip_grad_norm"),
        ({"gradients": "fp8"}, InputError, "gradients: got 'fp8', expected 'bf16' or 'bf16_error_feedback'"),
        (
            {"gradients": "bf16_error_feedback", "scaler": torch.amp.GradScaler("cpu")},
            InputError,
            "amp=torch.bfloat16",
        ),
        ({"amp": torch.float64}, InputError, "amp"),
        ({"loss_fn": lambda y, t: y}, InputError, "one number"),
        ({"plan": "nowhere.json"}, PlanError, "nowhere"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], error: type[Exception], words: str):
    model = net()
    given = {"loss_fn": cross_entropy, "batch": batches(1)[0]} | change
    loss_fn, batch = given.pop("loss_fn"), given.pop("batch")
    with pytest.raises(error, match=words):
        convoy.training_step(model, loss_fn, sgd(model), batch, **given)


def test_a_pruned_model_trains_under_its_mask(settings: convoy.Settings):
    from torch.nn.utils import prune

    model, stock = net(), net()
    for module in (model, stock):
        prune.l1_unstructured(module.conv, "weight", amount=0.5)
        module(batches(1)[0][0])  # what is left on the module now is a computed tensor, which cannot be deep-copied
    model.load_state_dict(stock.state_dict())
    ours, theirs = sgd(model), sgd(stock)
    step = convoy.training_step(model, cross_entropy, ours, batches(1)[0], settings=settings)
    for x, y in batches(2):
        step(x, y)
        theirs.zero_grad()
        cross_entropy(stock(x), y).backward()
        theirs.step()
    assert_close(state(model), state(stock))


def test_a_model_without_a_parameter_to_learn_is_refused():
    model = net().requires_grad_(False)
    with pytest.raises(InputError, match="requires a gradient"):
        convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0])


def test_a_plan_of_another_batch_is_refused(plan: Path):
    model = net()
    with pytest.raises(PlanError, match="this model, loss and batch"):
        convoy.training_step(model, cross_entropy, sgd(model), batches(1, n=3)[0], plan=plan)


def test_a_saved_plan_reads_back(plan: Path):
    assert {step.pattern for step in plans.load(plan).steps} >= {"conv", "dgrad", "wgrad"}


@pytest.mark.parametrize("moved", ["all", "images"])
def test_one_memory_format_serves_weights_that_lie_alike_in_both(settings: convoy.Settings, moved: str):
    """The weights of 1x1 and depthwise convolutions are contiguous either way; others may be in another format than images."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 4, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    x, y = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.tensor([0, 3])
    if moved == "all":
        model = model.to(memory_format=torch.channels_last)
    stock = copy.deepcopy(model)
    chosen = dataclasses.replace(settings, layout=convoy.settings.LayoutChoice.NHWC)
    step = convoy.training_step(model, cross_entropy, sgd(model), (x, y), settings=chosen)
    assert set(step.plan.border.values()) == ({"nhwc"} if moved == "all" else {"nhwc", "nchw"})
    loss = step(x, y)
    wanted = cross_entropy(stock(x), y)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_plan_is_replayed_with_the_casts_that_it_was_made_with(
    settings: convoy.Settings, monkeypatch: pytest.MonkeyPatch
):
    """Among several processes gradients are cast as they travel; the plan runs in one process too."""
    from convoy.schedule import Collective
    from convoy.training.step_program import StepOptions
    from convoy.training.training_job import TrainingJob

    model = nn.Sequential(*(nn.Conv2d(3, 3, 1, bias=False) for _ in range(4)), nn.Flatten(), nn.Linear(300, 5))

    def groups(replayed: object = None) -> set[tuple[str, ...]]:
        options = StepOptions(amp=torch.bfloat16)
        job = TrainingJob(
            model, cross_entropy, sgd(model), batches(1)[0], options, options.amp, settings, "net", replayed
        )
        graph = job.net.captured.graph
        made = {node.name: node.outputs[0] for node in graph.nodes}
        found = {nodes for pattern, nodes in job.net.regions_by_nodes if pattern == "casts"}
        return {tuple(made[node] for node in nodes) for nodes in found if made[nodes[0]] in graph.outputs}

    (whole,) = (group for group in groups() if len(group) == 4)
    parts = [whole[:2], whole[2:]]
    monkeypatch.setattr(TrainingJob, "_collectives", lambda self: [Collective(part, 1.0) for part in parts])
    apart = groups()
    assert set(parts) <= apart
    assert whole not in apart
    monkeypatch.undo()
    steps = [
        SimpleNamespace(pattern="casts", results=tuple(f"{name}@nhwc" for name in part), nodes=part) for part in parts
    ]
    assert groups(SimpleNamespace(steps=steps)) == apart


def test_a_finished_search_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = dataclasses.replace(SETTINGS, db=tmp_path / "perf.db")
    monkeypatch.setattr(training_job, "ceilings_of", lambda *_: Peaks(1e9, {"fp32": 1e9}))
    stages: list[str] = []
    search = training_job.tune_in_time
    monkeypatch.setattr(training_job, "tune_in_time", lambda *given: (stages.append("search"), search(*given))[1])
    models = [net(), net()]
    found = [tune_training_step(m, cross_entropy, sgd(m), batches(1)[0], settings=settings) for m in models]
    first, second = found
    assert stages == ["search"]
    assert second.plan.steps == first.plan.steps
    assert second.plan.notes[-1].startswith(FROM_DATABASE)
    assert second.summary.layers == first.summary.layers
    for batch in batches(3):
        losses = [float(one.step(*batch)) for one in found]
        assert losses[0] == losses[1]
    assert_close(state(models[1]), state(models[0]))


def test_a_stored_step_with_wrong_gradients_is_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = dataclasses.replace(SETTINGS, db=tmp_path / "perf.db")
    model = net()
    tune_training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings)
    build = start.build_program

    def wrong(*given: Any) -> Any:
        program = build(*given)
        run = program.runnable
        return dataclasses.replace(program, runnable=lambda inputs: [tensor * 1.01 for tensor in run(inputs)])

    monkeypatch.setattr(start, "build_program", wrong)
    found = tune_training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings)
    assert any(note.startswith(NOT_USED) and "gradients' error" in note for note in found.plan.notes)
