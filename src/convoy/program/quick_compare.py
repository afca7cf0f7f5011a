"""Two comparisons that PyTorch's own C++ code does faster than Python: whether dicts were written to, and where tensors lie.

Dynamo's guards and CUDA graph trees use them. Both functions are private to PyTorch, so each has a fallback: without it the
caller compares in Python, which costs three to ten times as much and gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch


def _dict_version() -> Callable[[dict[Any, Any]], int] | None:
    """Dynamo's counter of a dict's writes, where this PyTorch has one that works on this Python."""
    try:
        from torch._C._dynamo.guards import dict_version

        probe = {"a": 1}
        before = dict_version(probe)
        same = dict_version(probe) == before
        probe["a"] = 2
        return dict_version if same and dict_version(probe) != before else None
    except Exception:  # a private function may be gone, or refuse
        return None


class DictVersions:
    """Remembers how often dicts were written to; without PyTorch's counter it always says that they may have been.

    Args:
        dicts: the dicts.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = dicts
        self._count = _COUNT
        self.renew()

    def renew(self) -> None:
        """Remember the dicts as they are now."""
        self._versions = list(map(self._count, self._dicts)) if self._count is not None else None

    def unwritten(self) -> bool:
        """Whether no dict was written to since; false where that is not known."""
        count = self._count
        return count is not None and list(map(count, self._dicts)) == self._versions


class Addresses:
    """Remembers where tensors' values begin.

    Args:
        tensors: dense tensors.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._pointers = list(map(torch.Tensor.data_ptr, tensors))
        self._every = list(range(len(tensors)))

    def __iter__(self) -> Any:
        return iter(self._pointers)

    def unmoved(self) -> bool:
        """Whether every tensor's values still begin there."""
        if _SAME_POINTERS is not None:
            return bool(_SAME_POINTERS(self._tensors, self._pointers, self._every))
        return list(map(torch.Tensor.data_ptr, self._tensors)) == self._pointers


_COUNT: Final = _dict_version()
_SAME_POINTERS: Final = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
"""Only builds for GPUs have it."""
