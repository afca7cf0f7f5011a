"""`convoy.optimize(dynamic=...)` through the whole pipeline, with default engines: numbers, shared weights, changed weights."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy import plan as plans
from convoy.dynamic.dynamic_module import DynamicModule
from tests.unit.dynamic.fake_programs import Net, images
from tests.unit.pipeline.untimed import plans_kept
from tests.unit.program.fast_net import always_kept

CHANNELS = 48
"""Enough that a packed weight is large enough to be shared."""


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> DynamicModule:
    settings = convoy.Settings(effort="none", isolate=False, db=tmp_path_factory.mktemp("db") / "perf.db")
    with always_kept(), plans_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("convoy.dynamic.tune_sizes.MOST_PROGRAMS", 0)  # times would ask for more on some days
        made = convoy.optimize(Net(CHANNELS).eval(), (images(2),), settings=settings, dynamic={0: (1, 4)})
    assert isinstance(made, DynamicModule)
    return made


def check(fast: DynamicModule, x: torch.Tensor) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted, found = fast.model(x), fast(x)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor)
        assert found[name].stride() == tensor.stride()


def test_all_batches_are_exact_in_both_memory_formats(fast: DynamicModule) -> None:
    assert [program.runnable is not None for program in fast.programs] == [True] * 3
    for times in ({1: 1.0, 2: 1.0, 4: 9.0}, {1: 9.0, 2: 9.0, 4: 1.0}):  # split, and padded
        for images_each, time_ms in times.items():
            fast.size_programs.take((images_each,), time_ms)
        for count in range(1, 5):
            check(fast, images(count))
            check(fast, images(count).contiguous(memory_format=torch.channels_last))


def test_equal_weights_and_scratch_memory_are_held_once(fast: DynamicModule) -> None:
    runnables: list[Any] = [program.runnable for program in fast.programs]
    assert {id(one._shared) for one in runnables} == {id(fast.size_programs.memory)}
    by_bits: dict[tuple[Any, ...], set[int]] = {}
    for runnable in runnables:
        for step in runnable.bound.steps:
            for item in step.constants:
                if isinstance(item, torch.Tensor) and not item.is_mkldnn and item.numel() >= CHANNELS * 27:
                    by_bits.setdefault((item.stride(), *item.flatten().tolist()), set()).add(item.data_ptr())
    assert all(len(pointers) == 1 for pointers in by_bits.values())


def test_a_pickle_binds_the_plans_again_in_shared_memory_with_their_times(fast: DynamicModule) -> None:
    again = pickle.loads(pickle.dumps(fast))
    assert again.size_programs.times_ms == fast.size_programs.times_ms
    runnables: list[Any] = [program.runnable for program in again.programs]
    assert {id(one._shared) for one in runnables} == {id(again.size_programs.memory)}
    check(again, images(3))
    with torch.no_grad():
        again.model.conv.weight.neg_()
    with pytest.warns(UserWarning, match="conv.weight was changed in place"):
        again(images(3))
    again.refresh()
    check(again, images(3))


def test_one_file_holds_all_plans_with_their_times(fast: DynamicModule, tmp_path: Path) -> None:
    path = tmp_path / "net.plans.json"
    assert fast.save(path) == [path]
    again = convoy.load(fast.model, path, (images(3),), settings=convoy.Settings(db=tmp_path / "none.db"))
    assert isinstance(again, DynamicModule)
    assert not (tmp_path / "none.db").exists()
    assert again.plans == fast.plans
    assert again.size_programs.times_ms == fast.size_programs.times_ms
    check(again, images(3))
    with pytest.raises(convoy.InputError, match="outside of 1 to 4"):
        convoy.load(fast.model, path, (images(5),))
    with pytest.raises(convoy.PlanError, match="several sizes"):
        plans.load(path)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda data: data["ranges"][0].update(least=0), "plan.ranges[0]"),
        (lambda data: data["ranges"][0].update(places=[[0, 0], [0, 1]]), "plan.ranges[0].places"),
        (lambda data: data["ranges"][0].update(places=[[True, 0]]), "plan.ranges[0].places"),
        (lambda data: data["ranges"][0].update(places=[[7, 0]]), "args"),
        (lambda data: data["programs"][0].update(sizes=[9]), "plan.programs[0].sizes"),
        (lambda data: data["programs"][0].update(sizes=[]), "plan.programs[0].sizes"),
        (lambda data: data["programs"][0].update(sizes=[3]), "plan.inputs"),
        (lambda data: data["programs"][0].update(time_ms=-1), "plan.programs[0].time_ms"),
        (lambda data: data["programs"][0]["plan"].update(version=9), "plan.version"),
        (lambda data: data.update(programs=[]), "plan.programs"),
        (lambda data: data.update(ranges=[]), "plan.programs[0].sizes"),
        (lambda data: data.update(extra=1), "plan.extra"),
    ],
)
def test_a_damaged_file_is_refused_by_its_field(
    fast: DynamicModule, tmp_path: Path, damage: Callable[[Any], None], named: str
) -> None:
    path = tmp_path / "net.plans.json"
    fast.save(path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(convoy.InputError) as caught:
        convoy.load(fast.model, path, (images(2),))
    assert caught.value.argument == named


def small() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.randn(4, 3, 6, 6)


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[convoy.Settings]:
    with always_kept(), plans_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("convoy.dynamic.tune_sizes.MOST_PROGRAMS", 0)
        yield convoy.Settings(effort="none", isolate=False, db=tmp_path / "perf.db")


@torch.no_grad()
def test_after_a_change_that_mixes_images_batches_are_not_split(settings: convoy.Settings) -> None:
    model, x = small()
    fast = convoy.optimize(model, (x,), settings=settings, dynamic={0: (1, 4)})
    torch.testing.assert_close(fast(x[:3]), model(x[:3]))
    model[1] = nn.Softmax(0)
    with pytest.warns(UserWarning, match="batches are no longer split or padded"):
        fast.refresh()
    torch.testing.assert_close(fast(x), model(x))
    with pytest.warns(UserWarning, match="batches are not split"):
        torch.testing.assert_close(fast(x[:3]), model(x[:3]))
    model[1] = nn.SiLU()
    fast.refresh()
    torch.testing.assert_close(fast(x[:3]), model(x[:3]))
    assert not fast.size_programs.not_split


@torch.no_grad()
def test_a_file_that_says_that_batches_may_be_split_is_not_believed(settings: convoy.Settings, tmp_path: Path) -> None:
    model, x = small()
    model[1] = nn.Softmax(0)
    with pytest.warns(UserWarning, match="batches are not split"):
        fast = convoy.optimize(model, (x,), settings=settings, dynamic={0: (1, 4)})
    fast.add_size(2)
    fast.add_size(1)
    fast.size_programs.not_split = ""
    (path,) = fast.save(tmp_path / "net.plans.json")
    again = convoy.load(model, path, (x,), settings=settings)
    with pytest.warns(UserWarning, match="batches are not split"):
        torch.testing.assert_close(again(x[:3]), model(x[:3]))


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [None, {0: (3, 4)}])
def test_a_module_of_another_dtype_is_tuned_for_inputs_of_that_dtype(
    settings: convoy.Settings, dynamic: dict[int, tuple[int, int]] | None
) -> None:
    model, x = small()
    fast = convoy.optimize(model, (x,), settings=settings, dynamic=dynamic)
    model.double()
    assert fast.stale() is not None
    fast.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fast(x.double())
    assert fast.plan.inputs == ("fp64[4,3,6,6]",)
    assert fast.stale() is None
    torch.testing.assert_close(found, model(x.double()))


class ByData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


@torch.no_grad()
def test_a_layer_that_cannot_be_captured_leads_to_the_stock_module(settings: convoy.Settings) -> None:
    model, x = small()
    fast = convoy.optimize(model, (x,), settings=settings)
    model[1] = ByData()
    with pytest.warns(UserWarning, match="PyTorch runs"):
        fast.refresh()
    torch.testing.assert_close(fast(x), model(x))
