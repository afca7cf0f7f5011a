"""A training step's batch: its tensors, its signature, and how to build the batch again around other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch.utils import _pytree as pytree

PLAIN: Final = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
"""Types of the batch's entries besides tensors that a captured step may hold as constants."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch, flattened.

    Attributes:
        tensors: its tensors, in order.
        signature: what two batches of one captured step have in common: nesting, shapes, dtypes, devices, other values.
    """

    tensors: list[torch.Tensor]
    signature: tuple[Any, ...]
    _leaves: tuple[Any, ...]
    _spec: pytree.TreeSpec | None

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The same batch with other tensors in the places of its own."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        return tuple(leaves) if self._spec is None else pytree.tree_unflatten(leaves, self._spec)

    @property
    def strangers(self) -> list[Any]:
        """Entries that are neither tensors nor plain values."""
        return [leaf for leaf in self._leaves if not isinstance(leaf, (torch.Tensor, *PLAIN))]


def flatten_batch(batch: tuple[Any, ...]) -> FlatBatch:
    """Flatten (x, *targets), whose entries may nest tuples, lists and dictionaries."""
    if all(isinstance(entry, torch.Tensor) for entry in batch):
        return FlatBatch(list(batch), tuple(map(_sign, batch)), batch, None)
    leaves, spec = pytree.tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return FlatBatch(tensors, (spec, *map(_sign, leaves)), tuple(leaves), spec)


def _sign(leaf: Any) -> tuple[Any, ...]:
    if not isinstance(leaf, torch.Tensor):
        return cast("type[Any]", type(leaf)), leaf if isinstance(leaf, PLAIN) else id(leaf)
    if leaf.is_nested:
        return "nested", leaf.dtype, leaf.device
    return type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.layout
