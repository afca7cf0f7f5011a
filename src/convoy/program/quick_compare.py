"""Two comparisons in PyTorch's C++ code: whether dicts were written to, and whether tensors still have their addresses.

Dynamo's guards and CUDA graph trees use them. Both functions are private to PyTorch, so each has a fallback in Python, which
takes three to ten times as long and gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch


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
    """Detects writes to dicts. Without PyTorch's counter every dict counts as written.

    Args:
        dicts: dicts to watch.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = dicts
        self._count = _COUNT
        self.renew()

    def renew(self) -> None:
        """Remember the dicts as they are now."""
        self._versions = list(map(self._count, self._dicts)) if self._count is not None else None

    def unwritten(self) -> bool:
        """Whether no dict was written to since `renew`; false if that is unknown."""
        count = self._count
        return count is not None and list(map(count, self._dicts)) == self._versions


class Addresses:
    """Remembers the addresses of tensors.

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
        """Whether every tensor still has its address."""
        if _SAME_POINTERS is not None:
            return bool(_SAME_POINTERS(self._tensors, self._pointers, self._every))
        return list(map(torch.Tensor.data_ptr, self._tensors)) == self._pointers


_COUNT: Final = _dict_version()
_SAME_POINTERS: Final = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
"""Only builds with CUDA have this function."""
