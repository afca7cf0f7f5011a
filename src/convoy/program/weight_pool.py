"""WeightPool: packed weights of several programs, each held once.

Most engines pack a weight in the same way whatever the batch size. Weights are found by their bits, so nothing has to be known
about an engine's packing; a tensor is replaced only by one with equal bits, shape and strides.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, Final

import torch

from convoy.engines.base import Packed
from convoy.program.calls import is_plain
from convoy.program.state.contents import sums

LEAST_BYTES: Final = 4096
"""Smaller tensors, such as most biases, are left alone: a comparison costs more than they do."""

ALIGNED: Final = 64
"""Bytes at whose multiples PyTorch's tensors begin, unless they are parts of others. No kernel asks for more."""

_Key = tuple[Any, ...]


class WeightPool:
    """Packed weights by their bits. It keeps no weight alive: a program does."""

    def __init__(self) -> None:
        self._known: dict[_Key, list[weakref.ref[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def shared(self, packed: Packed) -> Packed:
        """The packed constants, with each tensor replaced by an equal one that another program holds already."""
        with self._lock:
            return tuple([self._shared(item) if isinstance(item, torch.Tensor) else item for item in packed])

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _key(tensor)
        if key is None:
            return tensor
        alive = [(ref, held) for ref in self._known.get(key, ()) if (held := ref()) is not None]
        for _, held in alive:
            if _alignment(held) >= _alignment(tensor) and _same_bits(held, tensor):
                return held
        self._known[key] = [*(ref for ref, _ in alive), weakref.ref(tensor)]
        return tensor


def _key(tensor: torch.Tensor) -> _Key | None:
    """What equal tensors have in common; None if the tensor is small, or its bits cannot be read."""
    if tensor.is_mkldnn:
        found = _opaque_bits(tensor)
        return None if found is None or len(found[1]) < LEAST_BYTES else ("mkldnn", tuple(tensor.shape), hash(found))
    plain = is_plain(tensor) and not tensor.is_complex()
    if not plain or tensor.numel() * tensor.element_size() < LEAST_BYTES:
        return None
    first, second = (int(one) for one in sums([tensor.detach()])[0])
    return (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), first, second)


def _alignment(tensor: torch.Tensor) -> int:
    """The power of two that a tensor's address is a multiple of, `ALIGNED` at most."""
    at = ALIGNED if tensor.is_mkldnn else tensor.data_ptr() | ALIGNED
    return at & -at


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if one.is_mkldnn:
        return _opaque_bits(one) == _opaque_bits(other)
    # As integers: a NaN is equal to itself, and zeros of different signs differ.
    return torch.equal(_words(one), _words(other))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()])


def _opaque_bits(tensor: torch.Tensor) -> tuple[bytes, bytes] | None:
    """Layout and data of a weight that oneDNN has packed; None if this PyTorch does not show them."""
    mkldnn: Any = torch.ops.mkldnn
    try:
        layout: torch.Tensor = mkldnn._get_mkldnn_serialized_md(tensor)
        return layout.numpy().tobytes(), ctypes.string_at(mkldnn.data_ptr(tensor), mkldnn._nbytes(tensor))
    except (AttributeError, RuntimeError):  # private to PyTorch; MKL's packed weights have no such layout
        return None
