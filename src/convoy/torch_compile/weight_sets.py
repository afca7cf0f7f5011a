"""WeightSets: what was packed for which weights.

Dynamo compiles a class's forward once, and runs the one graph for all instances of the class, each with its own weights.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import torch

WeightsVersion = tuple[int, tuple[int, ...]]
"""The sum of tensors' version counters, and their addresses."""

_version = attrgetter("_version")
_pointer = torch.Tensor.data_ptr

MOST_SETS: Final = 64
"""Sets of weights that are packed at once for one graph: more than blocks of one class in any usual net."""

WORTH_PACKING: Final = 8
"""Calls that packed weights must serve for packing to have been worth it: it takes about as long as some calls."""

MOST_PATIENCE: Final = 256
"""Calls in which weights must have stayed the same before they are packed again, at most."""


@dataclass(slots=True, eq=False)
class PackedWeights:
    """One set of weights: what runs with it, and how long it must stay the same before it is packed again.

    Attributes:
        stamp: of the tensors, when they were packed.
        run: computes with the packed values; None where they are not packed.
        held: the tensors' memory, which nothing else is given while `stamp` names its address.
        calls: that `run` has served.
        patience: calls that the weights must stay the same before they are packed.
        seen: their stamp in the last call that found `run` out of date.
        waited: calls since they last changed.
        left: calls that PyTorch computed since they were packed.
        refs: one a tensor; any tensor's end takes the set out.
    """

    stamp: WeightsVersion | None = None
    run: Callable[..., Any] | None = None
    held: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    calls: int = 0
    patience: int = 0
    seen: WeightsVersion | None = None
    waited: int = 0
    left: int = 0
    refs: list[weakref.ref[torch.Tensor]] = field(default_factory=list[weakref.ref[torch.Tensor]])

    def is_current(self, stamp: WeightsVersion) -> bool:
        """Whether `run` computes with the weights' present values; counts a call where it does."""
        if self.run is None or stamp != self.stamp:
            return False
        self.calls += 1
        return True

    def pack(self, weights: Sequence[torch.Tensor], stamp: WeightsVersion, run: Callable[..., Any]) -> None:
        """Take what was packed of the weights, as they are by this stamp, for the present call and later ones."""
        self.held = [tensor.detach() for tensor in weights]
        self.stamp, self.run, self.calls = stamp, run, 1

    def release(self) -> None:
        """Let go of what was packed."""
        self.run, self.held = None, []

    def is_due(self, stamp: WeightsVersion) -> bool:
        """Whether the weights, which `run` does not have, are to be packed in this call; else PyTorch computes it.

        Weights that change after few calls, as in a training loop that evaluates now and then, must stay the same for longer
        and longer before they are packed again.
        """
        if stamp != self.seen:
            if self.run is not None:
                lasted = self.calls >= WORTH_PACKING
                self.patience = 0 if lasted else min(MOST_PATIENCE, max(1, 2 * self.patience))
                self.calls = self.left = 0
                self.release()
            self.seen, self.waited = stamp, 0
        self.waited += 1
        due = self.waited > self.patience
        self.left += not due
        return due


class WeightSets:
    """Sets of weights by the tensors' identity, the least recently used one dropped first. It keeps no tensor alive.

    Args:
        most: sets to keep.

    Attributes:
        wasted: sets that ended before they had served `WORTH_PACKING` calls.
    """

    def __init__(self, most: int = MOST_SETS) -> None:
        self._most = most
        self._sets: OrderedDict[tuple[int, ...], PackedWeights] = OrderedDict()
        self._last: tuple[tuple[int, ...], PackedWeights | None] = ((), None)
        self.wasted = 0

    def __len__(self) -> int:
        return len(self._sets)

    def of(self, weights: Sequence[torch.Tensor]) -> PackedWeights:
        """The entry of these very tensors; a new one where there is none."""
        # A tensor's id is its own for as long as it lives, and its end takes the entry out.
        key = tuple(map(id, weights))
        last, found = self._last
        if found is not None and key == last:
            return found
        found = self._sets.get(key)
        if found is None:
            found = PackedWeights(patience=WORTH_PACKING if self.wasted >= WORTH_PACKING else 0)
            found.refs = [weakref.ref(tensor, lambda _: self._drop(key)) for tensor in weights]
            self._sets[key] = found
            while len(self._sets) > self._most:
                self._drop(next(iter(self._sets)))
        else:
            self._sets.move_to_end(key)
        self._last = key, found
        return found

    def _drop(self, key: tuple[int, ...]) -> None:
        if self._last[0] == key:
            self._last = (), None
        dropped = self._sets.pop(key, None)
        if dropped is not None:
            self.wasted += dropped.calls < WORTH_PACKING
            dropped.release()


def version_of(weights: Sequence[torch.Tensor]) -> WeightsVersion:
    """What differs after every change of the tensors that PyTorch counts, and after each that gives them other memory.

    Not after a write through `.data`, a pointer or NumPy, nor for tensors made in inference mode.
    """
    pointers = tuple(map(_pointer, weights))
    try:
        return sum(map(_version, weights)), pointers
    except RuntimeError:  # tensors made in inference mode count no changes
        return sum(tensor._version for tensor in weights if not tensor.is_inference()), pointers
