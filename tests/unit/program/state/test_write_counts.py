"""Counts of writes to tensors by the words of PyTorch's objects: each write is seen, and other layouts are found out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from convoy.program.state import tensor_fields
from convoy.program.state.tensor_fields import WriteCounts, write_counts
from tests.unit.program.state.test_tensor_fields import flat

OFFSETS = tensor_fields._COUNTER_OFFSETS
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/mem").exists(), reason="this system lets nobody read the memory of a process"
)


def test_the_offsets_of_this_pytorch_are_found():
    """Supported versions of PyTorch must not lose them without anybody's notice."""
    assert OFFSETS is not None


def write_all(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


WRITES: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "an operator": lambda tensors: tensors[0].mul_(2),
    "an index": lambda tensors: tensors[2].__setitem__((0, 0), 3),
    "a view": lambda tensors: tensors[2].t()[:1].zero_(),
    "an alias": lambda tensors: tensors[4].detach().add_(1),
    "another list": lambda tensors: torch._foreach_add_(tensors[:2], 1),
    "an output": lambda tensors: torch.add(torch.ones(4), 1, out=tensors[1]),
    "no element": lambda tensors: tensors[3].zero_(),
    "all": write_all,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITES)
def test_each_write_is_seen(name: str, mode: type):
    tensors = flat()
    counts = write_counts([tensor.detach() for tensor in tensors])
    assert counts is not None
    kept = [tensor.detach() for tensor in tensors]
    assert [one.sum() for one in kept]  # reads, and further owners
    assert counts.unwritten()
    with mode():
        WRITES[name](tensors)
    assert not counts.unwritten()
    again = write_counts(kept)
    assert again is not None
    assert again.unwritten()


def test_as_autograd_counts_them():
    """Thousands of writes in random order: a change of a tensor's count is a change of its word, and nothing else is."""
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.zeros(int(size)) for size in torch.randint(0, 5, (40,), generator=draw)]
    aliases = [tensor.detach() for tensor in tensors]
    counts, before = write_counts(aliases), [tensor._version for tensor in tensors]
    for index in torch.randint(0, 400, (3000,), generator=draw).tolist():
        assert counts is not None
        if index < len(tensors):
            tensors[index].add_(1)
        else:
            tensors[index % len(tensors)].add(1)
        now = [tensor._version for tensor in tensors]
        assert counts.unwritten() == (now == before)
        counts, before = (counts, before) if now == before else (write_counts(aliases), now)


def test_the_counters_live_as_long_as_they_are_compared():
    """Else a counter's memory would be given to another one."""
    counts = [write_counts([torch.zeros(3).detach()]) for _ in range(200)]
    more = [torch.zeros(3).add_(1) for _ in range(400)]
    assert more
    assert all(one is not None and one.unwritten() for one in counts)


def test_no_tensor_is_written():
    counts = write_counts([])
    assert counts is not None
    assert counts.unwritten()


def test_tensors_of_inference_mode_have_no_counter():
    with torch.inference_mode():
        one = torch.ones(2)
    assert write_counts([one]) is None


@pytest.mark.parametrize("change", [{"writes": 8}, {"counter": 16}, {"counter": 16, "writes": 0}])
def test_a_wrong_offset_of_a_counter_is_found_out(change: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    assert OFFSETS is not None
    wrong = dataclasses.replace(OFFSETS, **change)
    with pytest.raises(ValueError, match="other counters"):
        WriteCounts(flat(), wrong)
    monkeypatch.setattr(tensor_fields, "_COUNTER_OFFSETS", wrong)
    assert write_counts(flat()) is None


def test_offsets_of_counters_that_are_not_clear_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_fields, "_MOST_WORDS", 4)
    assert tensor_fields._counter_offsets() is None
    monkeypatch.undo()
    monkeypatch.setattr(WriteCounts, "unwritten", lambda self: True)
    assert tensor_fields._counter_offsets() is None
    monkeypatch.undo()
    monkeypatch.setattr(tensor_fields, "_words_if_readable", lambda address, count: [address] * count)
    assert tensor_fields._counter_offsets() is None


def test_a_pointer_that_leads_nowhere_is_an_error():
    with pytest.raises(OSError, match="Input/output error"):
        tensor_fields._words_if_readable(8, 1)
