"""Comparisons in C give the answers of Python's, and do without where Python or PyTorch lack them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import UserDict

import pytest
import torch
from torch import nn

from convoy.program.state import object_fields, quick_compare, tensor_fields
from convoy.program.state.module_state import ModuleState
from convoy.program.state.quick_compare import Addresses, DictVersions, ObjectTypes, VersionCounters
from tests.unit.program.test_stale import CHANGES, net

WAYS = ("fields", "functions", "by hand")


@pytest.fixture(params=WAYS)
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether writes to dicts are counted: by fields of CPython's objects, by PyTorch's functions, or not at all."""
    if request.param == "fields":
        if not object_fields.can_read(object_fields.DICT_VERSION):
            pytest.skip("this Python has other dicts")
        return True
    monkeypatch.setattr(object_fields, "_READABLE", frozenset())
    monkeypatch.setattr(tensor_fields, "_OFFSETS", None)
    monkeypatch.setattr(tensor_fields, "_COUNTER_OFFSETS", None)
    if request.param == "functions":
        if quick_compare._COUNT is None:
            pytest.skip("this PyTorch counts no writes to dicts")
        return True
    monkeypatch.setattr(quick_compare, "_COUNT", None)
    monkeypatch.setattr(quick_compare, "_SAME_POINTERS", None)
    monkeypatch.setattr(quick_compare, "_saved", lambda _: None)
    return False


def test_this_python_has_the_fields():
    """The supported Pythons, 3.11 and 3.12, must not lose them without anybody's notice."""
    assert frozenset({object_fields.OBJECT_TYPE, object_fields.DICT_VERSION}) == object_fields._READABLE


def test_a_field_that_counts_no_writes_is_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_fields, "DICT_VERSION", object_fields.OBJECT_TYPE)
    assert not object_fields._counts_writes()
    monkeypatch.setattr(object_fields, "OBJECT_TYPE", 0)  # the reference count
    assert not object_fields._reads_types()


def test_writes_to_dicts_are_seen(counted: bool):
    first, second = {"a": 1}, {}
    versions = DictVersions([first, second])
    assert versions.unwritten() == counted
    for write in (lambda: first.update(a=2), lambda: second.setdefault("b", 1), lambda: first.pop("a"), second.clear):
        write()
        assert not versions.unwritten()
        versions.renew()
        assert versions.unwritten() == counted


def test_other_mappings_count_as_written(counted: bool):
    del counted
    versions = DictVersions([{"a": 1}, UserDict(a=1)])  # type: ignore[list-item]
    assert not versions.unwritten()
    versions.renew()
    assert not versions.unwritten()


def test_attributes_of_a_module_count_as_writes(counted: bool):
    module = nn.BatchNorm2d(2)
    versions = DictVersions([vars(module), module._parameters, module._buffers])
    changes = [
        lambda: setattr(module, "eps", 1.0),
        lambda: setattr(module, "weight", nn.Parameter(torch.ones(2))),
        lambda: setattr(module, "running_mean", torch.ones(2)),
        lambda: delattr(module, "eps"),
        module.eval,
    ]
    for change in changes:
        change()
        assert not versions.unwritten()
        versions.renew()


def test_another_class_is_seen(counted: bool):
    del counted
    modules = [nn.ReLU(), nn.Sigmoid()]
    types = ObjectTypes(modules)
    assert types.unchanged()
    assert list(types) == [nn.ReLU, nn.Sigmoid]
    modules[1].__class__ = nn.Tanh
    assert not types.unchanged()


def test_memory_is_compared(counted: bool):
    del counted
    tensors = [torch.zeros(2), torch.ones(3)]
    addresses = Addresses(tensors)
    assert addresses.unmoved()
    kept = tensors[1].detach()
    tensors[1].data = torch.ones(3)
    assert not addresses.unmoved()
    assert kept.data_ptr() in list(addresses)


@pytest.mark.parametrize("taken_in", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("written_in", [torch.no_grad, torch.inference_mode])
def test_a_write_in_place_is_seen_in_every_mode(counted: bool, taken_in: type, written_in: type):
    del counted
    tensors = [nn.Parameter(torch.ones(2)), torch.ones(3)]
    for tensor in tensors:
        with taken_in():
            counters = VersionCounters([one.detach() for one in tensors])
            assert counters.unwritten()
        assert counters.unwritten()
        with written_in():
            tensor.mul_(2)
            assert not counters.unwritten()
        assert not counters.unwritten()


def test_tensors_of_other_kinds_are_counted_one_by_one(counted: bool):
    del counted
    tensors = [torch.ones(2), torch.ones(2)]
    counters = VersionCounters([tensors[0].detach()], tensors[1:])
    assert counters.unwritten()
    tensors[1].add_(1)
    assert not counters.unwritten()


@pytest.mark.parametrize("by_fields", [True, False])
def test_hooks_and_transforms_of_the_caller_see_nothing(by_fields: bool, monkeypatch: pytest.MonkeyPatch):
    if not by_fields:
        monkeypatch.setattr(tensor_fields, "_COUNTER_OFFSETS", None)
    packed: list[torch.Tensor] = []
    one = nn.Parameter(torch.ones(2))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    def inside(x: torch.Tensor) -> torch.Tensor:
        found.append(VersionCounters([one.detach()]))
        return x * 2

    found: list[VersionCounters] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        inside(one)
    torch.func.vmap(inside)(torch.ones(2))
    assert not packed
    assert [counters._saved for counters in found] == [None, None]
    assert all(counters.unwritten() for counters in found)
    with torch.no_grad():
        one.add_(1)
    assert not any(counters.unwritten() for counters in found)


@pytest.mark.parametrize("by_fields", [True, False])
def test_the_users_tensors_stay_as_they_are(by_fields: bool, monkeypatch: pytest.MonkeyPatch):
    """Nothing else owns them, so that they can be swapped; they get no hooks and no place in a graph; and all memory is freed."""
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    alias = one.detach()
    if not by_fields:
        monkeypatch.setattr(tensor_fields, "_COUNTER_OFFSETS", None)
    counters = VersionCounters([alias])
    assert (counters._counts is not None, counters._saved is not None) == (by_fields, not by_fields)
    assert (one._use_count(), one.grad_fn, one.grad, one._version) == (1, None, None, 0)
    torch.utils.swap_tensors(one, other)
    gc.collect()
    gc.disable()
    try:
        freed = weakref.ref(alias)
        del alias, counters
        assert freed() is None
    finally:
        gc.enable()


def test_threads_compare_at_once():
    tensors = [torch.ones(1) for _ in range(50)]
    state = ModuleState(nn.ParameterList([nn.Parameter(one) for one in tensors]))
    answers: list[str | None] = []

    def ask() -> None:
        answers.extend({state.change() for _ in range(50)})

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [None] * 4


def test_equal_values_written_anew_are_no_change_and_are_looked_at_once(counted: bool):
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)).eval()
    state = ModuleState(module)
    module[1].eps = float("1e-5")
    assert state.change() is None
    assert state._written.unwritten() == counted
    module[1].momentum = 0.5
    assert state.change() == "1.momentum was changed"


def test_an_entry_of_a_dict_that_was_empty_is_seen(counted: bool):
    del counted
    module = nn.Sequential(nn.ReLU())
    state = ModuleState(module)
    assert state.change() is None
    module[0].register_buffer("late", torch.ones(1))
    assert state.change() == "a parameter, buffer or submodule was added"
    del module[0].late
    assert state.change() is None


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_seen(counted: bool, name: str):
    del counted
    module = net()
    state = ModuleState(module)
    assert state.change() is None
    CHANGES[name](module)
    assert state.change() is not None


def test_a_tensor_of_one_element_that_takes_anothers_place_in_a_list_is_watched(counted: bool):
    del counted
    module = nn.Conv2d(1, 1, 1)
    module.scales = [torch.ones(1)]
    state = ModuleState(module)
    module.scales[0] = torch.ones(1)
    assert state.change() is None  # the same value
    module.scales[0].mul_(2)
    assert state.change() == "scales.0 was changed in place"
