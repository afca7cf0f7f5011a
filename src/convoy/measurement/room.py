"""Room: how much of a GPU PyTorch may take in this process while something is tuned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def limit_memory(most_bytes: int) -> None:
    """Let PyTorch hold so many bytes of the current GPU from now on; what asks for more is out of memory."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total))


@contextmanager
def memory_limited(device: str, further_bytes: int | None) -> Iterator[None]:
    """Let PyTorch hold so many bytes more than it holds now, until the end of the block.

    Args:
        device: `cpu` or `cuda`; on a CPU nothing is limited.
        further_bytes: so many; None: as many as before.
    """
    if device != "cuda" or further_bytes is None:
        yield
        return
    before = torch.cuda.memory.get_per_process_memory_fraction()
    limit_memory(torch.cuda.memory_reserved() + further_bytes)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
