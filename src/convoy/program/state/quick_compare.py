"""Comparisons of hundreds of dicts, objects and tensors in C: were they written to, and do they have their types and addresses?

Each uses what Python or PyTorch may lack: fields of CPython's objects, and functions that Dynamo's guards and CUDA graph trees
use. So each has a fallback, which takes two to fifty times as long and gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, Final, cast

import torch

from convoy.program import calls
from convoy.program.state.object_fields import DICT_VERSION, OBJECT_TYPE, MemoryWords, can_read
from convoy.program.state.tensor_fields import tensor_fields, write_counts

_VERSION: Final = attrgetter("_version")


def _dict_version() -> Callable[[dict[Any, Any]], int] | None:
    """Dynamo's counter of writes to a dict; None if this PyTorch has none that works with this Python."""
    try:
        from torch._C._dynamo.guards import dict_version

        probe = {"a": 1}
        before = dict_version(probe)
        same = dict_version(probe) == before
        probe["a"] = 2
        return dict_version if same and dict_version(probe) != before else None
    except Exception:  # everything: the function is private to PyTorch, so it may be missing or raise anything
        return None


class DictVersions:
    """Detects writes to dicts, by Python's counters or Dynamo's. Without either, and among other mappings, all count as written.

    Args:
        dicts: dicts to watch.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = dicts
        known = all(
            isinstance(cast("object", one), dict) for one in dicts
        )  # an optimizer's state may be of another kind
        self._fields = MemoryWords.of(dicts, DICT_VERSION) if known and can_read(DICT_VERSION) else None
        self._count = _COUNT if known else None
        self.renew()

    def renew(self) -> None:
        """Remember the dicts as they are now."""
        if self._fields is not None:
            self._fields.renew()
        elif self._count is not None:
            self._versions = list(map(self._count, self._dicts))

    def unwritten(self) -> bool:
        """Whether no dict was written to since `renew`; false if that is unknown."""
        if self._fields is not None:
            return self._fields.unchanged()
        count = self._count
        return count is not None and list(map(count, self._dicts)) == self._versions


class ObjectTypes:
    """Detects objects that got another class.

    Args:
        objects: objects to watch.
    """

    def __init__(self, objects: Sequence[object]) -> None:
        self._objects = objects
        self._types = list(map(type, objects))
        self._fields = MemoryWords.of(objects, OBJECT_TYPE) if can_read(OBJECT_TYPE) else None

    def __iter__(self) -> Iterator[type[Any]]:
        return iter(self._types)

    def unchanged(self) -> bool:
        """Whether every object still has its class."""
        if self._fields is not None:
            return self._fields.unchanged()
        return list(map(type, self._objects)) == self._types


class Addresses:
    """Remembers the addresses of tensors.

    Args:
        tensors: dense tensors.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._pointers = list(map(torch.Tensor.data_ptr, tensors))
        self._fields = tensor_fields(tensors)
        self._every = list(range(len(tensors)))

    def __iter__(self) -> Any:
        return iter(self._pointers)

    def unmoved(self) -> bool:
        """Whether every tensor still has its address."""
        if self._fields is not None:
            return self._fields.unmoved()
        if _SAME_POINTERS is not None:
            return bool(_SAME_POINTERS(self._tensors, self._pointers, self._every))
        return list(map(torch.Tensor.data_ptr, self._tensors)) == self._pointers


class VersionCounters:
    """Detects tensors that were written in place.

    Their counters are read from PyTorch's memory. Where that is not possible, autograd compares all counters at once when it
    hands out what a function saved for its backward pass: the tensors are saved that way by a function that nobody
    differentiates. Of ResNet-50's 320 tensors that takes 13 us instead of 1 (an Intel Xeon, 6338f329).

    Args:
        aliases: what `Tensor.detach` returned for dense tensors: it shares their counters. A tensor that is saved itself has an
            owner more, and `torch.utils.swap_tensors` refuses it.
        others: further tensors that count versions.
    """

    def __init__(self, aliases: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> None:
        self._counts = write_counts(aliases)
        self._saved = _saved(aliases) if self._counts is None else None
        self._summed = [*others, *(aliases if self._counts is None and self._saved is None else ())]
        self._sum = sum(map(_VERSION, self._summed))

    def unwritten(self) -> bool:
        """Whether no tensor was written in place."""
        if self._counts is not None and not self._counts.unwritten():
            return False
        if self._saved is not None:
            try:
                self._saved.grad_fn.saved_tensors  # pyright: ignore  # noqa: B018 - it raises if a counter differs
            except RuntimeError:
                return False
        return not self._summed or sum(map(_VERSION, self._summed)) == self._sum


class _Saving(torch.autograd.Function):
    """Saves tensors for a backward pass that never comes."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:  # pyright: ignore
        ctx.save_for_backward(*tensors)
        return start.clone()


def _saved(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A tensor whose `grad_fn` has saved these tensors; it must live as long as that. None where they cannot be saved."""
    if not tensors or calls.why_modes_forbid() is not None or _has_saving_hooks():
        return None
    try:
        # A transform, a mode or a hook of the caller's must neither see nor change this.
        with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunction():
            start = torch.ones((), requires_grad=True, device="cpu")
            made: torch.Tensor = cast("Any", _Saving).apply(start, tensors)
        same = all(map(is_, cast("Any", made.grad_fn).saved_tensors, tensors))
    except Exception:  # everything: how PyTorch saves tensors is private to it
        return None
    return made if same else None


def _has_saving_hooks() -> bool:
    """Whether hooks on saved tensors are active, such as `torch.autograd.graph.save_on_cpu`, which would change them."""
    top = getattr(cast("Any", torch._C)._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


_COUNT: Final = _dict_version()
_SAME_POINTERS: Final = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
"""Only builds with CUDA have this function."""
