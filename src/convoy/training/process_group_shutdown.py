"""Parting: captured collectives are let go before their process group is shut down, for NCCL waits for every graph that has some.

Without this the last line of a usual script, `destroy_process_group()`, never returns while the step is still in reach
(pytorch/pytorch#115388; seen on two H200, NCCL as in torch 2.11). PyTorch has no hook there, so `ProcessGroup.shutdown`, by which
every group ends, is wrapped once.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

MARK = "_convoy_lets_go"
"""What the wrapped method is known by."""


class GraphHolder(Protocol):
    """Has a graph in which there may be a group's collectives."""

    @property
    def group(self) -> Any:
        """The process group, or None."""
        ...

    def release(self) -> None:
        """Let go of the graph."""
        ...


_holders: weakref.WeakSet[GraphHolder] = weakref.WeakSet()


def release_before_shutdown(holder: GraphHolder) -> None:
    """Have a holder let go of its graph before its group is shut down; it is not kept alive for that."""
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
    ProcessGroup.shutdown = shutdown  # type: ignore[method-assign]
