"""DynamicModule: every size in the range is right, whatever programs compute it; what is unseen never waits."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy.dynamic.dynamic_module import DynamicModule
from convoy.program import optimized_module
from tests.unit.dynamic.fake_programs import Makes, Net, images, linear, module_for


@pytest.fixture
def fast() -> DynamicModule:
    return module_for(Net().eval(), images(4), dynamic={0: (1, 64)})


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def ran(module: DynamicModule) -> list[int]:
    """Images of each program that ran, in order."""
    tuner: Any = module.program_cache.tuner
    return tuner.ran


def check(fast: nn.Module, stock: nn.Module, x: torch.Tensor, *rest: Any) -> None:
    with torch.no_grad():
        wanted, found = stock(x, *rest), fast(x, *rest)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor)
        assert found[name].stride() == tensor.stride()


def test_every_batch_of_the_range_has_the_stock_modules_numbers_and_strides(fast: DynamicModule) -> None:
    assert sorted(fast.size_programs.times_ms) == [(1,), (2,), (4,), (8,), (16,), (32,), (64,)]
    for count in range(1, 65):
        ran(fast).clear()
        check(fast, fast.model, images(count))
        assert sum(ran(fast)) == count  # with these times no batch is padded


def test_batches_between_are_split_or_padded_by_the_times(fast: DynamicModule) -> None:
    check(fast, fast.model, images(37))
    assert ran(fast) == [32, 4, 1]
    for images_each in (1, 2, 4, 8, 16, 32):
        fast.size_programs.take((images_each,), 80.0)
    fast.size_programs.take((64,), 40.0)
    ran(fast).clear()
    check(fast, fast.model, images(37))
    assert ran(fast) == [64]


def test_the_first_plan_is_that_of_the_example(fast: DynamicModule) -> None:
    assert fast.plan.inputs == ("[4, 3, 6, 6]",)
    assert len(fast.plans) == 7


def test_the_largest_bucket_is_tuned_first_and_each_gets_an_equal_part_of_the_time() -> None:
    tuner = Makes()
    module_for(Net().eval(), images(2), dynamic={0: (1, 4)}, tuner=tuner, time_s=30.0)
    assert tuner.times == pytest.approx([6.0, 9.0, 18.0], rel=0.1)
    assert ran(module_for(Net().eval(), images(2), dynamic={0: (1, 4)})) == []


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (images(65), "dynamic.0. is 65, outside of 1 to 64"),
        (images(0), "dynamic.0. is 0, outside of 1 to 64"),
        (images(5, 7), "no plan for these input shapes"),
        (images(5).double(), "no plan for these input shapes or dtypes"),
        (images(5).requires_grad_(), "requires a gradient"),
    ],
)
def test_calls_that_are_not_like_the_example_are_answered_by_the_stock_module(
    fast: DynamicModule, x: torch.Tensor, words: str
) -> None:
    if x.dtype == torch.float64:
        fast.model.double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fast(x)
        fast(x)
    assert torch.equal(found["maps"], fast.model(x)["maps"])
    (told,) = caught
    assert re.search(words, str(told.message))
    assert told.filename == __file__
    assert ran(fast) == []


def test_measured_times_ask_for_further_programs_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.dynamic.dynamic_module.call_ms", lambda run, device: 1.0 + run()["maps"].shape[0])
    tuner = Makes()
    fast = module_for(Net().eval(), images(2), dynamic={0: (1, 16)}, tuner=tuner, time_s=50.0, most_programs=7)
    added = {sizes[0] for sizes in fast.size_programs.times_ms} - {1, 2, 4, 8, 16}
    assert len(added) == 2
    assert tuner.times[5:] == pytest.approx([25.0, 50.0], rel=0.1)
    over = module_for(Net().eval(), images(2), dynamic={0: (1, 16)}, time_s=1e-9, most_programs=7)
    assert len(over.programs) == 5


def test_changed_weights_are_noticed_in_batches_between_too(fast: DynamicModule) -> None:
    check(fast, fast.model, images(5))
    with torch.no_grad():
        fast.model.head.weight.mul_(2)
    ran(fast).clear()
    with pytest.warns(UserWarning, match=r"head.weight was changed in place.*refresh"):
        check(fast, fast.model, images(5))
    assert ran(fast) == []
    before = fast.size_programs.memory
    fast.refresh()
    assert fast.size_programs.memory is not before
    check(fast, fast.model, images(37))
    assert ran(fast) == [32, 4, 1]
    fast.load_state_dict({name: value * -1 for name, value in fast.state_dict().items()})
    with pytest.warns(UserWarning, match="refresh"):
        check(fast, fast.model, images(37))


def test_training_mode_runs_the_stock_module(fast: DynamicModule) -> None:
    fast.train()
    with pytest.warns(UserWarning, match="training mode"):
        made = fast(images(5))
    assert made["scores"].requires_grad


def test_threads_share_the_programs(fast: DynamicModule) -> None:
    wrong: list[int] = []

    def call(seed: int) -> None:
        for count in (3, 37, 63, 5):
            x = images(count, seed=seed)
            with torch.no_grad():
                if not torch.equal(fast(x)["maps"], fast.model(x)["maps"]):
                    wrong.append(count)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_copy_has_times_and_counts_of_its_own(fast: DynamicModule) -> None:
    twin = copy.deepcopy(fast)
    twin.size_programs.take((64,), 0.1)
    assert fast.size_programs.times_ms[64,] == 64.01
    assert twin.size_programs.memory is fast.size_programs.memory
    check(fast, twin.model, images(37))


def test_an_input_of_another_batch_is_not_split_and_forms_of_a_call_are_one() -> None:
    net = Net().eval()
    fast = module_for(net, images(2), torch.tensor([2.0]), dynamic={"x": {0: (1, 4)}})
    x, scale = images(3), torch.tensor([3.0])
    with torch.no_grad():
        wanted, scores = net(x, scale), net(x, scale, maps=False)
    for found in (fast(x, scale), fast(x, scale=scale), fast(scale=scale, x=x), fast(x, scale, maps=True)):
        assert torch.equal(found["maps"], wanted["maps"])
    assert ran(fast) == [2, 1] * 4
    with pytest.warns(UserWarning, match="or for an option's value"):
        assert torch.equal(fast(x, scale, maps=False), scores)


class Mixing(nn.Module):
    """A planted fault: a trace of the other images in each result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.conv(x)
        return made + 1e-4 * made.mean(0)


class Loss(Mixing):
    """A scalar."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).square().mean()


@pytest.mark.parametrize(
    ("kind", "words"), [(Mixing, "other images of its batch"), (Loss, "dimension 0 is not the batch")]
)
def test_a_net_that_mixes_images_has_exact_programs_only(kind: type[nn.Module], words: str) -> None:
    net = kind().eval()
    with pytest.warns(UserWarning, match=f"batches are not split or padded: .*{words}") as told:
        fast = module_for(net, images(2), dynamic={0: (1, 8)})
    assert len(told) == 1
    assert len(fast.programs) == 1
    with torch.no_grad():
        assert torch.equal(fast(images(2)), net(images(2)))
        with pytest.warns(UserWarning, match=r"no program for these sizes \(0: 3\).*add_size\(\{0: 3\}\)"):
            assert torch.equal(fast(images(3)), net(images(3)))
        fast(images(5))  # one warning for all sizes
        assert ran(fast) == [2]
        fast.add_size(3)
        ran(fast).clear()
        assert torch.equal(fast(images(3)), net(images(3)))
    assert ran(fast) == [3]


def test_image_sizes_are_exact_and_made_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net().eval()
    fast = module_for(net, images(2), dynamic={0: (1, 2), 2: (4, 12), 3: (4, 12)})
    check(fast, net, images(1))
    x = images(2, 8)
    with pytest.warns(UserWarning, match=r"no program for these sizes \(0: 2, 2: 8, 3: 8\)"):
        check(fast, net, x)
    check(fast, net, x)
    check(fast, net, images(2, 10))
    assert fast.size_programs.seen == {(2, 8, 8): 2, (2, 10, 10): 1}
    assert [plan.inputs for plan in fast.add_size({2: 8, 3: 8})] == [("[2, 3, 8, 8]",), ("[1, 3, 8, 8]",)]
    assert fast.size_programs.seen == {(2, 10, 10): 1}
    linear(fast)
    for count in (1, 2):
        check(fast, net, images(count, 8))
    assert ran(fast) == [1, 2]
    monkeypatch.setattr(optimized_module, "improve", lambda module, *_: module.plan)
    assert fast.improve(time_s=20.0) is fast.plan
    assert 9 < fast.program_cache.tuner.times[-1] <= 10  # type: ignore[attr-defined]
    check(fast, net, images(2, 10))
    assert fast.improve(20.0, (images(1, 12),)).inputs == ("[1, 3, 12, 12]",)


def test_batches_that_are_split_often_get_a_program_when_asked(
    fast: DynamicModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimized_module, "improve", lambda module, *_: module.plan)
    for _ in range(3):
        fast(images(37))
    fast.improve(time_s=20.0)
    linear(fast)
    check(fast, fast.model, images(37))
    assert ran(fast) == [37]


@pytest.mark.parametrize(
    ("sizes", "argument"),
    [
        (0, "sizes[0]"),
        (65, "sizes[0]"),
        (True, "sizes[0]"),
        ({0: 2.0}, "sizes[0]"),
        ({2: 8}, "sizes"),
        ({}, "sizes"),
        ("8", "sizes"),
    ],
)
def test_sizes_that_cannot_be_added_are_named(fast: DynamicModule, sizes: Any, argument: str) -> None:
    with pytest.raises(convoy.InputError) as caught:
        fast.add_size(sizes)
    assert caught.value.argument == argument


@pytest.mark.parametrize("time_s", [0, -1.0, float("nan"), True])
def test_a_time_that_is_none_is_named(fast: DynamicModule, time_s: Any) -> None:
    with pytest.raises(convoy.InputError, match="time_s"):
        fast.improve(time_s)
    with pytest.raises(convoy.InputError, match="time_s"):
        fast.add_size(3, time_s)


def test_where_nothing_is_faster_the_stock_module_runs_whole_and_silently() -> None:
    net = Net().eval()
    fast = module_for(net, images(2), dynamic={0: (1, 4)}, tuner=Makes(faster=False))
    assert sorted(fast.size_programs.times_ms) == [(1,), (2,), (4,)]
    given: list[int] = []
    net.forward = lambda x: given.append(x.shape[0])  # type: ignore[method-assign]
    fast(images(3))
    assert given == [3]
