"""Destroys captured graphs with collectives before their process group shuts down, because NCCL waits for such graphs.

Otherwise the usual last line of a script, `destroy_process_group()`, never returns while the step is alive
(pytorch/pytorch#115388; seen on two H200, NCCL of torch 2.11). PyTorch has no hook for this, so `ProcessGroup.shutdown`, which
ends every group, is wrapped once.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

MARK = "_convoy_releases_graphs"
"""Attribute of the wrapped method."""


class GraphHolder(Protocol):
    """Has a CUDA graph that may contain collectives of a group."""

    @property
    def group(self) -> Any:
        """The process group, or None."""
        ...

    def release(self) -> None:
        """Destroy the graph."""
        ...


_holders: weakref.WeakSet[GraphHolder] = weakref.WeakSet()


def release_before_shutdown(holder: GraphHolder) -> None:
    """Have a holder destroy its graph before its group shuts down. Only a weak reference to the holder is kept."""
    from torch.distributed import ProcessGroup

    _holders.add(holder)
    original = ProcessGroup.shutdown
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def shutdown(group: Any) -> None:
        for one in list(_holders):
            if one.group is group:
                one.release()
        original(group)

    setattr(shutdown, MARK, True)
    ProcessGroup.shutdown = shutdown  # pyright: ignore[reportAttributeAccessIssue]
