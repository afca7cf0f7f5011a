"""Where hundreds of tensors have their memory, and how often they were written in place, compared with before in a single step.

`Tensor.data_ptr` and `Tensor._version` take 70 ns a tensor; its words take 5 to 15 ns. PyTorch promises no layout of its objects.
So their offsets are found with tensors of known places and known numbers of writes, and each time that words are remembered, they
must be what PyTorch's own functions say of every tensor. Otherwise these functions are asked in every comparison.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch

from convoy.program.state.object_fields import WORD, MemoryWords, has_known_layout

_MOST_WORDS: Final = 20
"""Words of PyTorch's tensor that are looked through; it is longer."""

_FIRST_WORDS: Final = 4
"""Words of its storage, and of its counter of writes, that are looked through."""

_WRITES: Final = 0xFFFFFFFF
"""The counter has 32 bits; the rest of its word is not used."""

_PROBED_WRITES: Final = (41, 97, 170)
"""Writes to the tensors with which the counter is found: numbers that nothing else in it has."""


@dataclass(frozen=True, slots=True)
class TensorOffsets:
    """Offsets in bytes.

    Attributes:
        tensor: the pointer to PyTorch's tensor, in the Python object.
        storage: the pointer to the storage, in PyTorch's tensor.
        start: the number of elements in front of the tensor's first one, in PyTorch's tensor.
        memory: the address of the memory, in the storage.
    """

    tensor: int
    storage: int
    start: int
    memory: int


class TensorFields:
    """Remembers the storage, the first element and the memory of dense tensors.

    Args:
        tensors: the tensors.
        offsets: those of this PyTorch.

    Raises:
        ValueError: PyTorch says otherwise of a tensor than the words at these offsets.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], offsets: TensorOffsets) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        places = [_cdata(storage) for storage in storages]
        self._own = MemoryWords.of(tensors, offsets.tensor)
        own = list(map(_cdata, tensors))
        if self._own.words() != own:
            raise ValueError("this PyTorch has other tensors")
        self._storages = MemoryWords(own, (offsets.storage,), tensors)
        self._starts = MemoryWords(own, (offsets.start,), tensors)
        # The tensors may let go of their storages, so these are kept here.
        self._memory = MemoryWords(places, (offsets.memory,), storages)
        found = (self._storages.words(), self._starts.words(), self._memory.words())
        wanted = (
            places,
            [tensor.storage_offset() for tensor in tensors],
            [storage.data_ptr() for storage in storages],
        )
        if found != wanted:
            raise ValueError("this PyTorch has other tensors")

    def unmoved(self) -> bool:
        """Whether every tensor is where it was."""
        # First: a Python object that was given another of PyTorch's tensors no longer keeps the memory of its former one.
        return (
            self._own.unchanged()
            and self._storages.unchanged()
            and self._starts.unchanged()
            and self._memory.unchanged()
        )


@dataclass(frozen=True, slots=True)
class CounterOffsets:
    """Offsets in bytes.

    Attributes:
        counter: the pointer to the counter of writes, in PyTorch's tensor.
        writes: the number of writes, in the counter.
    """

    counter: int
    writes: int


class WriteCounts:
    """Remembers how often tensors were written in place.

    Args:
        aliases: what `Tensor.detach` returned for the tensors. An alias shares the counter and keeps it alive.
        offsets: those of this PyTorch.

    Raises:
        ValueError: PyTorch says otherwise of a tensor than the words at these offsets.
    """

    def __init__(self, aliases: Sequence[torch.Tensor], offsets: CounterOffsets) -> None:
        kept = list(aliases)
        counters = MemoryWords(map(_cdata, kept), (offsets.counter,), kept).words()
        if not all(counters):
            raise ValueError("a tensor without a counter")
        self._words = MemoryWords(counters, (offsets.writes,), kept)
        if [word & _WRITES for word in self._words.words()] != [alias._version for alias in kept]:
            raise ValueError("this PyTorch has other counters")

    def unwritten(self) -> bool:
        """Whether no tensor was written in place."""
        return self._words.unchanged()


def tensor_fields(tensors: Sequence[torch.Tensor]) -> TensorFields | None:
    """The places of tensors; None where their words cannot be read."""
    if _OFFSETS is None:
        return None
    try:
        return TensorFields(tensors, _OFFSETS)
    except Exception:  # everything: also a storage without an address, as PyTorch's functions raise for it
        return None


def write_counts(aliases: Sequence[torch.Tensor]) -> WriteCounts | None:
    """The counts of writes to tensors with these aliases; None where their words cannot be read."""
    if _COUNTER_OFFSETS is None:
        return None
    try:
        return WriteCounts(aliases, _COUNTER_OFFSETS)
    except Exception:  # everything: also a tensor of inference mode, which has no counter
        return None


def _cdata(value: torch.Tensor | torch.UntypedStorage) -> int:
    """The address of PyTorch's own object."""
    return cast("Any", value)._cdata


def _offsets() -> TensorOffsets | None:
    """The offsets, found with tensors whose places are known; None if they are not clear."""
    if not has_known_layout():
        return None
    try:
        with torch.inference_mode(False), torch._C.DisableTorchFunction():
            whole = torch.zeros(64, device="cpu")
            parts = [whole.as_strided((2,), (1,), start) for start in (13, 29)]
        storage = whole.untyped_storage()
        own = cast("Any", torch._C).TensorBase.__basicsize__ // WORD
        found = TensorOffsets(
            _only([_index(_words(id(part), own), _cdata(part)) for part in parts]),
            _only([_index(_words(_cdata(part), _FIRST_WORDS), _cdata(storage)) for part in parts]),
            _only([_index(_words(_cdata(part), _MOST_WORDS), int(part.storage_offset())) for part in parts]),
            _index(_words(_cdata(storage), _FIRST_WORDS), storage.data_ptr()),
        )
        return found if _sees_moves(found) else None
    except Exception:  # everything: each name may be missing in another PyTorch
        return None


def _sees_moves(offsets: TensorOffsets) -> bool:
    """Whether each kind of move is seen, and nothing else."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), torch.no_grad():
        tensors = [torch.zeros(6, device="cpu") for _ in range(3)]
        moves = [
            lambda: setattr(tensors[0], "data", torch.zeros(6, device="cpu")),
            lambda: setattr(tensors[1], "data", tensors[1].data[2:]),
            lambda: cast("Any", tensors[2].untyped_storage()).resize_(4096),
        ]
        for move in moves:
            places = TensorFields(tensors, offsets)
            for tensor in tensors:
                tensor.add_(1)
            if not places.unmoved():
                return False
            move()
            if places.unmoved():
                return False
    return True


def _counter_offsets() -> CounterOffsets | None:
    """The offsets, found with tensors that were written to a known number of times; None if they are not clear."""
    if not has_known_layout():
        return None
    try:
        with torch.inference_mode(False), torch._C.DisableTorchFunction(), torch.no_grad():
            tensors = [torch.zeros(2, device="cpu") for _ in _PROBED_WRITES]
            aliases = [tensor.detach() for tensor in tensors]
            for tensor, writes in zip(tensors, _PROBED_WRITES, strict=True):
                for _ in range(writes):
                    tensor.add_(1)
        # An alias shares two of the words that differ between tensors: the pointers to the storage and to the counter.
        own = [_words(_cdata(tensor), _MOST_WORDS) for tensor in tensors]
        shared = [_words(_cdata(alias), _MOST_WORDS) for alias in aliases]
        storages = [_cdata(tensor.untyped_storage()) for tensor in tensors]
        columns = list(zip(*own, strict=True))
        common = [index for index, column in enumerate(zip(*shared, strict=True)) if column == columns[index]]
        found = _only([i * WORD for i in common if len({*columns[i]}) == len(tensors) and [*columns[i]] != storages])
        counters = [_words_if_readable(words[found // WORD], _FIRST_WORDS) for words in own]
        counts = [[word & _WRITES for word in words] for words in counters]
        offsets = zip(counts, _PROBED_WRITES, strict=True)
        made = CounterOffsets(found, _only([_index(words, writes) for words, writes in offsets]))
        return made if _sees_writes(made) else None
    except Exception:  # everything: names may be missing in another PyTorch; a system may hide memory
        return None


def _sees_writes(offsets: CounterOffsets) -> bool:
    """Whether each kind of write is seen, and nothing else."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), torch.no_grad():
        tensors = [torch.zeros(6, device="cpu") for _ in range(3)]
        aliases = [tensor.detach() for tensor in tensors]
        writes = [
            lambda: tensors[0].add_(1),
            lambda: tensors[1].__setitem__(0, 1),
            lambda: tensors[2][1:].view(5).zero_(),
        ]
        for write in writes:
            counts = WriteCounts(aliases, offsets)
            more = [tensor.detach() + 1 for tensor in tensors]  # further owners are no writes
            if not counts.unwritten() or len(more) != len(tensors):
                return False
            write()
            if counts.unwritten():
                return False
    return True


def _words_if_readable(address: int, count: int) -> list[int]:
    """Words of this process's memory. Where nothing lies at the address, it raises OSError, and reading by ctypes would crash."""
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return list(memoryview(memory.read(count * WORD)).cast("Q"))


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _index(words: list[int], wanted: int) -> int:
    """Bytes in front of the first word of this value; raises ValueError if there is none."""
    return words.index(wanted) * WORD


def _only(offsets: list[int]) -> int:
    """The offset on which all agree; raises ValueError if they do not."""
    (found,) = set(offsets)
    return found


_OFFSETS: Final = _offsets()
_COUNTER_OFFSETS: Final = _counter_offsets()
