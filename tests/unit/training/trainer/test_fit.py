"""fit: a training by tuned steps is the stock one; a checkpoint goes on where it was; what is wrong is said."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.errors import ConvoyError, InputError
from convoy.training.trainer import fit as module
from convoy.training.trainer.checkpoint import TrainingPosition
from convoy.training.trainer.epoch import TrainingStart
from convoy.training.trainer.fit import fit
from convoy.training.trainer.recipe import TrainingRecipe, with_amp
from convoy.zoo import Dataset, Preprocessing, load_dataset
from tests.unit.training.training_nets import net

SETTINGS = convoy.Settings(isolate=False, solver="baseline", only_engines=("aten",))
STOCK = TrainingRecipe(epochs=2, batch=8, lr=0.05, stock=True)


def images(count: int = 40) -> Dataset:
    return load_dataset(f"synthetic:{count}", preprocessing=Preprocessing(10), classes=5)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit")
    model = net()
    batch = next(iter(images().batches(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = dataclasses.replace(SETTINGS, db=folder / "perf.db")
    return convoy.training_step(model, cross_entropy, optimizer, batch, settings=settings).save(folder / "plan.json")


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.state_dict().values() if p.is_floating_point()])


def test_tuned_and_stock_train_alike(plan: Path):
    tuned, stock = net(0.3), net(0.3)
    ours = list(fit(tuned, images(), dataclasses.replace(STOCK, stock=False, plan=None), settings=SETTINGS))
    theirs = list(fit(stock, images(), STOCK))
    assert [epoch.loss for epoch in ours] == pytest.approx([epoch.loss for epoch in theirs], rel=1e-3)
    torch.testing.assert_close(weights(tuned), weights(stock), rtol=1e-3, atol=1e-4)
    assert [(epoch.number, epoch.steps) for epoch in ours] == [(1, 5), (2, 5)]


def test_it_learns_and_says_how_well(plan: Path):
    model = net()
    recipe = TrainingRecipe(epochs=8, batch=8, lr=0.1, plan=plan)
    epochs = list(fit(model, images(), recipe, test=images()))
    assert epochs[-1].loss < epochs[0].loss
    assert epochs[-1].accuracy > 0.25  # of five classes
    assert epochs[-1].images_per_s > 0
    assert model.training


def stopped(model: nn.Module, recipe: TrainingRecipe, after: int) -> None:
    """Train until so many steps are made, in all epochs together."""
    made = 0

    def watch(message: str, *_: int) -> None:
        nonlocal made
        made += message.startswith("epoch")
        if made == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(fit(model, images(), recipe, observer=watch))


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path, plan: Path, stop: int):
    recipe = TrainingRecipe(epochs=2, batch=8, lr=0.05, plan=plan, checkpoint=tmp_path / "state.pt", every=1)
    whole, resumed = net(), net()
    list(fit(whole, images(), dataclasses.replace(recipe, checkpoint=None, every=0)))
    stopped(net(), recipe, stop)
    list(fit(resumed, images(), dataclasses.replace(recipe, resume=True)))
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_a_checkpoint_amid_an_accumulated_update_waits_for_its_end(
    tmp_path: Path, plan: Path, stop: int, *, stock: bool
):
    recipe = TrainingRecipe(epochs=2, batch=8, lr=0.05, accumulate=2, checkpoint=tmp_path / "state.pt", every=1)
    recipe = dataclasses.replace(recipe, stock=stock, plan=None if stock else plan)
    whole, resumed = net(), net()
    list(fit(whole, images(), dataclasses.replace(recipe, checkpoint=None, every=0)))
    stopped(net(), recipe, stop)
    epochs = list(fit(resumed, images(), dataclasses.replace(recipe, resume=True)))
    assert sum(epoch.steps for epoch in epochs) == 8 - (
        stop - stop % 2
    )  # nothing but the update that had begun is lost
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("every", "accumulate", "steps"),
    [
        (1, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        (3, 1, [3, 6]),
        (1, 2, [2, 4, 6]),
        (3, 2, [4, 6]),
        (3, 4, [4]),
        (5, 2, [6]),
        (0, 2, []),
    ],
)
def test_checkpoints_are_written_between_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, accumulate: int, steps: list[int]
):
    written: list[TrainingPosition] = []
    monkeypatch.setattr(module, "write_checkpoint", lambda *args: written.append(args[4]))
    recipe = TrainingRecipe(batch=8, stock=True, accumulate=accumulate, checkpoint=tmp_path / "state.pt", every=every)
    list(fit(net(), images(72), recipe))  # nine batches: of two to an update, eight are taken
    assert written == [*(TrainingPosition(0, step) for step in steps), TrainingPosition(1, 0)]


def test_an_update_that_had_begun_begins_anew_where_more_are_accumulated(tmp_path: Path):
    recipe = dataclasses.replace(STOCK, epochs=1, checkpoint=tmp_path / "state.pt", every=1)
    stopped(net(), recipe, 3)
    (epoch,) = fit(net(), images(), dataclasses.replace(recipe, accumulate=2, resume=True))
    assert epoch.steps == 2


def test_an_epoch_makes_whole_updates(plan: Path):
    recipe = dataclasses.replace(STOCK, accumulate=2)
    tuned, stock = net(), net()
    ours = list(fit(tuned, images(), dataclasses.replace(recipe, stock=False, plan=plan)))
    theirs = list(fit(stock, images(), recipe))
    assert [epoch.steps for epoch in ours] == [epoch.steps for epoch in theirs] == [4, 4]
    torch.testing.assert_close(weights(tuned), weights(stock), rtol=1e-3, atol=1e-4)


def test_fewer_batches_than_an_update_are_refused():
    with pytest.raises(InputError, match="at most the 5 batches"):
        fit(net(), images(), dataclasses.replace(STOCK, accumulate=6))


def test_dropout_goes_on_where_it_was(tmp_path: Path):
    recipe = dataclasses.replace(STOCK, checkpoint=tmp_path / "state.pt", every=1)
    whole, resumed = net(0.5), net(0.5)
    list(fit(whole, images(), dataclasses.replace(recipe, checkpoint=None, every=0)))
    stopped(net(0.5), recipe, 3)
    torch.manual_seed(99)
    list(fit(resumed, images(), dataclasses.replace(recipe, resume=True)))
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.gpu
@pytest.mark.parametrize("stock", [True, False])
def test_dropout_on_a_gpu_goes_on_where_it_was(tmp_path: Path, *, stock: bool):
    """A linear layer behind dropout: its kernels give the same bits twice, so what differs is what was dropped."""

    def linear() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(300, 5)).cuda()

    recipe = dataclasses.replace(STOCK, stock=stock)
    settings = dataclasses.replace(SETTINGS, db=tmp_path / "perf.db")
    whole, resumed, plan = linear(), linear(), tmp_path / "plan.json"
    list(fit(whole, images(), recipe, settings=settings, on_plan=lambda step: step.save(plan)))
    recipe = dataclasses.replace(
        recipe, plan=None if stock else plan, checkpoint=tmp_path / "state.pt", every=1, resume=True
    )
    stopped(linear(), recipe, 7)
    torch.manual_seed(99)
    list(fit(resumed, images(), recipe))
    assert torch.equal(weights(resumed), weights(whole))


def test_what_a_killed_training_left_is_removed(tmp_path: Path):
    kept = [tmp_path / name for name in (".state.pt.notes", ".state2.pt.0123abcd", "state.pt.0123abcd")]
    left = tmp_path / ".state.pt.0123abcd"
    for file in (*kept, left):
        file.touch()
    list(fit(net(), images(), dataclasses.replace(STOCK, checkpoint=tmp_path / "state.pt", epochs=1)))
    assert set(tmp_path.iterdir()) == {*kept, tmp_path / "state.pt"}


def test_a_damaged_checkpoint_is_said_and_changes_nothing(tmp_path: Path):
    file = tmp_path / "state.pt"
    recipe = dataclasses.replace(STOCK, checkpoint=file, epochs=1)
    list(fit(net(), images(), recipe))
    whole = file.read_bytes()
    model = net()
    before = weights(model)
    for damaged in (b"", b"text", whole[: len(whole) // 2], whole[:200] + b"\0" * 400 + whole[600:]):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match="checkpoint"):
            list(fit(model, images(), dataclasses.replace(recipe, resume=True)))
    assert torch.equal(before, weights(model))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    recipe = dataclasses.replace(STOCK, checkpoint=tmp_path / "state.pt", epochs=1)
    list(fit(net(), images(), recipe))
    other = nn.Sequential(nn.Flatten(), nn.Linear(300, 5))
    with pytest.raises(InputError, match="checkpoint of this model"):
        list(fit(other, images(), dataclasses.replace(recipe, resume=True)))


def test_a_checkpoint_that_runs_code_is_not_loaded(tmp_path: Path):
    class Evil:
        def __reduce__(self) -> Any:
            return (tmp_path / "run").touch, ()

    file = tmp_path / "state.pt"
    torch.save({"format": Evil()}, file)
    with pytest.raises(InputError, match="checkpoint"):
        list(fit(net(), images(), dataclasses.replace(STOCK, checkpoint=file, resume=True)))
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stock", [True, False])
def test_the_rate_falls_with_each_update(plan: Path, accumulate: int, *, stock: bool):
    """PyTorch warns where a schedule goes on before the optimizer does."""
    recipe = dataclasses.replace(STOCK, accumulate=accumulate, stock=stock, plan=None if stock else plan)
    rates: list[float] = []
    training = module._Fit(net(), images(), recipe, SETTINGS, None, lambda *_: rates.append(rate()), None)

    def rate() -> float:
        return training.optimizer.param_groups[0]["lr"]

    list(training.run())
    updates = 2 * (5 // accumulate)
    curve = [0.05 * (1 + math.cos(math.pi * done / updates)) / 2 for done in range(updates + 1)]
    made = [step for _ in range(2) for step in range(accumulate * (5 // accumulate))]
    wanted = [curve[(index + 1) // accumulate] for index in range(len(made))]
    assert rates == pytest.approx(wanted, abs=1e-9)


def test_more_epochs_than_were_planned_go_on_along_the_new_curve(tmp_path: Path):
    recipe = dataclasses.replace(STOCK, checkpoint=tmp_path / "state", epochs=1)
    list(fit(net(), images(), recipe))
    more = dataclasses.replace(recipe, epochs=4, resume=True)
    training = module._Fit(net(), images(), more, SETTINGS, None, lambda *_: None, None)
    wanted = 0.05 * (1 + math.cos(math.pi / 4)) / 2
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(wanted)
    assert [epoch.number for epoch in training.run()] == [2, 3, 4]
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_a_checkpoint_of_larger_epochs_is_refused(tmp_path: Path):
    recipe = dataclasses.replace(STOCK, checkpoint=tmp_path / "state", every=1)
    stopped(net(), recipe, 4)
    with pytest.raises(InputError, match="4 steps of an epoch are made, which has 2 here"):
        fit(net(), images(), dataclasses.replace(recipe, batch=20, resume=True))


def test_a_loss_that_is_no_number_ends_the_training():
    model = net()
    with torch.no_grad():
        model.fc.bias.fill_(float("nan"))
    with pytest.raises(ConvoyError, match="a lower lr"):
        list(fit(model, images(), STOCK))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch": 0}, "batch"),
        ({"lr": -1.0}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"every": -1}, "every"),
        ({"resume": True}, "checkpoint"),
    ],
)
def test_wrong_recipes_are_named(change: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        dataclasses.replace(STOCK, **change)


def test_fewer_images_than_a_batch_are_refused():
    with pytest.raises(InputError, match="at most the 5 images"):
        fit(net(), images(5), STOCK)


def test_words_of_amp():
    assert with_amp(STOCK, "bf16").amp is torch.bfloat16
    with pytest.raises(InputError, match="amp"):
        with_amp(STOCK, "fp16")


def test_shards_are_equal_and_hold_every_image_once():
    whole = images(11)
    shards = [whole.shard(index, 3) for index in range(3)]
    assert [len(shard) for shard in shards] == [3, 3, 3]
    seen = torch.cat([x for shard in shards for x, _ in shard.batches(3)])
    wanted = next(iter(whole.batches(9)))[0]
    assert sorted(seen.sum((1, 2, 3)).tolist()) == sorted(wanted.sum((1, 2, 3)).tolist())


def started(recipe: TrainingRecipe, **words: Any) -> tuple[TrainingStart, module._Fit]:
    training = module._Fit(net(), images(), recipe, SETTINGS, None, lambda *_: None, None, **words)
    return training.start(), training


@pytest.mark.parametrize(("stop", "position"), [(3, (0, 3)), (6, (1, 1)), (8, (1, 3))])
def test_a_resumed_training_follows_the_epochs_and_rates_that_are_asked_for(
    tmp_path: Path, stop: int, position: tuple[int, int]
):
    recipe = dataclasses.replace(STOCK, checkpoint=tmp_path / "state", every=1)
    stopped(net(), recipe, stop)
    asked = dataclasses.replace(recipe, epochs=4, lr=0.2, momentum=0.5, weight_decay=0.0, resume=True)
    start, training = started(asked)
    curve = [0.2 * (1 + math.cos(math.pi * done / 20)) / 2 for done in range(21)]
    assert dataclasses.astuple(start)[:4] == (*position, 5, 4)
    assert start.is_resumed
    assert start.lr == pytest.approx(curve[stop])
    (group,) = training.optimizer.param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0.0)
    rates = [group["lr"]]
    training.watch = lambda *_: rates.append(training.optimizer.param_groups[0]["lr"])
    epochs = list(training.run())
    assert rates == pytest.approx(curve[stop:], abs=1e-9)
    assert [epoch.lr for epoch in epochs] == pytest.approx([curve[5 * epoch.number - 1] for epoch in epochs])


def test_a_training_that_is_done_starts_at_its_end(tmp_path: Path):
    recipe = dataclasses.replace(STOCK, checkpoint=tmp_path / "state")
    list(fit(net(), images(), recipe))
    start, training = started(dataclasses.replace(recipe, resume=True))
    assert (start.epochs_done, start.step, start.epochs) == (2, 0, 2)
    assert list(training.run()) == []


def test_a_checkpoint_that_is_there_is_not_overwritten_without_resume(tmp_path: Path):
    recipe = dataclasses.replace(STOCK, checkpoint=tmp_path / "state", epochs=1)
    list(fit(net(), images(), recipe))
    before = (tmp_path / "state").read_bytes()
    with pytest.raises(InputError, match=r"checkpoint: got .*a file that is not there yet"):
        fit(net(), images(), recipe)
    assert (tmp_path / "state").read_bytes() == before


def test_an_epoch_that_has_begun_goes_on_with_the_same_batch_and_classes(tmp_path: Path):
    recipe = dataclasses.replace(STOCK, checkpoint=tmp_path / "state", every=1)
    stopped(net(), recipe, 3)
    with pytest.raises(InputError, match=r"batch is 8 and not 4 amid an epoch \(3 steps are made\)"):
        started(dataclasses.replace(recipe, batch=4, resume=True))
    list(fit(net(), images(), dataclasses.replace(recipe, resume=True), about={"classes": '["a", "b"]'}))
    with pytest.raises(InputError, match=r'classes is \["a", "b"\] and not \["a", "c"\]'):
        started(dataclasses.replace(recipe, resume=True), about={"classes": '["a", "c"]'})
    start, _ = started(
        dataclasses.replace(recipe, batch=4, epochs=3, resume=True)
    )  # between two epochs it may be another
    assert (start.epochs_done, start.step, start.steps) == (2, 0, 10)
