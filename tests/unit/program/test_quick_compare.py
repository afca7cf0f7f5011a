"""Comparisons by PyTorch's own C++ code give the answers of Python's, and do without where PyTorch lacks them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from convoy.program import quick_compare
from convoy.program.quick_compare import Addresses, DictVersions
from convoy.program.state.module_state import ModuleState


@pytest.fixture(params=[True, False], ids=["counted", "by hand"])
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(quick_compare, "_COUNT", None)
        monkeypatch.setattr(quick_compare, "_SAME_POINTERS", None)
    elif quick_compare._COUNT is None:
        pytest.skip("this PyTorch counts no writes to dicts")
    return request.param


def test_writes_to_dicts_are_seen(counted: bool):
    first, second = {"a": 1}, {}
    versions = DictVersions([first, second])
    assert versions.unwritten() == counted
    for write in (lambda: first.update(a=2), lambda: second.setdefault("b", 1), lambda: first.pop("a"), second.clear):
        write()
        assert not versions.unwritten()
        versions.renew()
        assert versions.unwritten() == counted


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


def test_memory_is_compared(counted: bool):
    del counted
    tensors = [torch.zeros(2), torch.ones(3)]
    addresses = Addresses(tensors)
    assert addresses.unmoved()
    kept = tensors[1].detach()
    tensors[1].data = torch.ones(3)
    assert not addresses.unmoved()
    assert kept.data_ptr() in list(addresses)


def test_equal_values_written_anew_are_no_change_and_are_looked_at_once(counted: bool):
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)).eval()
    state = ModuleState(module)
    module[1].eps = float("1e-5")
    assert state.change() is None
    assert state._written.unwritten() == counted
    module[1].momentum = 0.5
    assert state.change() == "1.momentum was changed"


def test_a_tensor_of_one_element_that_takes_anothers_place_in_a_list_is_watched(counted: bool):
    del counted
    module = nn.Conv2d(1, 1, 1)
    module.scales = [torch.ones(1)]
    state = ModuleState(module)
    module.scales[0] = torch.ones(1)
    assert state.change() is None  # the same value
    module.scales[0].mul_(2)
    assert state.change() == "scales.0 was changed in place"
