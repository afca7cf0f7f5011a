"""Places of tensors by the words of PyTorch's objects: each move is seen, and other layouts are found out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from convoy.program.state import tensor_fields
from convoy.program.state.quick_compare import Addresses
from convoy.program.state.tensor_fields import TensorFields, TensorOffsets

OFFSETS = tensor_fields._OFFSETS


@pytest.fixture(params=["fields", "functions"])
def by_fields(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "functions":
        monkeypatch.setattr(tensor_fields, "_OFFSETS", None)
    return request.param == "fields"


def test_the_offsets_of_this_pytorch_are_found():
    """Supported versions of PyTorch must not lose them without anybody's notice."""
    assert OFFSETS is not None


def flat() -> list[torch.Tensor]:
    """Parameters in one buffer, a buffer of strides, one without elements, one of one element."""
    whole = torch.arange(64.0)
    one, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    one.data, other.data = whole[:4], whole[4:8]
    return [one, other, torch.zeros(4, 4).t()[1:], torch.empty(0), torch.tensor(7, dtype=torch.int64)]


def exchange(tensors: list[torch.Tensor]) -> None:
    tensors[0].data, tensors[1].data = tensors[1].data, tensors[0].data


def set_data(tensors: list[torch.Tensor]) -> None:
    tensors[2].data = torch.zeros(4, 4)


def go_on(tensors: list[torch.Tensor]) -> None:
    tensors[1].data = tensors[1].data[1:]


def resize_storage(tensors: list[torch.Tensor]) -> None:
    tensors[4].untyped_storage().resize_(1 << 16)


def give_memory(tensors: list[torch.Tensor]) -> None:
    tensors[3].data = torch.ones(5)


def swap(tensors: list[torch.Tensor]) -> None:
    torch.utils.swap_tensors(tensors[2], torch.ones(3))


def swap_for_sparse(tensors: list[torch.Tensor]) -> None:
    """Which has no storage at all."""
    torch.utils.swap_tensors(tensors[2], torch.ones(3, 4).to_sparse())


MOVES: list[Callable[[list[torch.Tensor]], None]] = [
    exchange, set_data, go_on, resize_storage, give_memory, swap, swap_for_sparse,
]  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
def test_each_move_is_seen(by_fields: bool, move: Callable[[list[torch.Tensor]], None]):
    tensors = flat()
    addresses = Addresses(tensors)
    assert (addresses._fields is not None) == by_fields
    for tensor in tensors:
        with torch.no_grad():
            tensor.add_(1)
    assert addresses.unmoved()
    move(tensors)
    try:
        assert not addresses.unmoved()
    except RuntimeError:  # a sparse tensor has no address to ask for; `ModuleState` takes it for a change
        assert not by_fields


def test_no_tensor_moves_nowhere():
    assert Addresses([]).unmoved()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TensorOffsets)])
def test_a_wrong_offset_is_found_out(field: str, monkeypatch: pytest.MonkeyPatch):
    """By what PyTorch says of the tensors, so that its functions are asked instead."""
    assert OFFSETS is not None
    wrong = dataclasses.replace(OFFSETS, **{field: OFFSETS.memory + 8 if field == "memory" else 8})
    if field in ("tensor", "storage"):  # they lead on: to an object's class, which has words of its own
        wrong = dataclasses.replace(wrong, start=0)
    with pytest.raises(ValueError, match="other tensors"):
        TensorFields(flat(), wrong)
    monkeypatch.setattr(tensor_fields, "_OFFSETS", wrong)
    addresses = Addresses(flat())
    assert addresses._fields is None
    assert addresses.unmoved()


def test_offsets_that_are_not_clear_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_fields, "_MOST_WORDS", 1)
    assert tensor_fields._offsets() is None
    monkeypatch.undo()
    monkeypatch.setattr(TensorFields, "unmoved", lambda self: True)
    assert tensor_fields._offsets() is None


def test_the_users_tensors_have_no_further_owner():
    one = nn.Parameter(torch.ones(2))
    addresses = Addresses([one])
    assert one._use_count() == 1
    torch.utils.swap_tensors(one, nn.Parameter(torch.zeros(2)))
    assert not addresses.unmoved()
