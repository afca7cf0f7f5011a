"""TensorFields: where hundreds of tensors have their memory, compared with former places in a single step.

`Tensor.data_ptr` takes 70 ns a tensor; three words of a tensor take 15 ns. PyTorch promises no layout of its objects. So their
offsets are found with tensors of known places, and each time that places are remembered, the words must be what PyTorch's own
functions say of every tensor. Otherwise these functions are asked in every comparison.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from convoy.program.state.object_fields import WORD, MemoryWords, has_known_layout

_MOST_WORDS: Final = 20
"""Words of PyTorch's tensor that are looked through; it is longer."""

_FIRST_WORDS: Final = 4
"""Words of its storage that are looked through."""


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
        self._storages = MemoryWords.of(tensors, offsets.tensor, offsets.storage)
        self._starts = MemoryWords.of(tensors, offsets.tensor, offsets.start)
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
        return self._storages.unchanged() and self._starts.unchanged() and self._memory.unchanged()


def tensor_fields(tensors: Sequence[torch.Tensor]) -> TensorFields | None:
    """The places of tensors; None where their words cannot be read."""
    if _OFFSETS is None:
        return None
    try:
        return TensorFields(tensors, _OFFSETS)
    except Exception:  # everything: also a storage without an address, as PyTorch's functions raise for it
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
