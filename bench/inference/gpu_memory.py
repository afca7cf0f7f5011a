"""Memory of a GPU between the providers of one process."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def free() -> None:
    """Give back what earlier cases held: what goes later would be subtracted from what a provider of this one holds."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def largest_run(call: Callable[[], object]) -> int:
    """Bytes that one run allocates at most; a captured graph has its own before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
