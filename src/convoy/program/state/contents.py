"""ContentsCheck: checksums of a module's tensors, which detect changes that version counters miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from convoy.program.state.module_contents import has_pointer

_COLUMNS: Final = 1024
_CHUNK: Final = {"cuda": 1 << 26, "cpu": 1 << 20}
"""Words that are summed at once. Small tensors are concatenated, large ones are read in place."""

_ODD: Final = 0x1E3779B97F4A7C15
"""An odd factor that spreads weights over 64 bits."""

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CHANGED: Final = "the contents of a parameter or buffer were changed"


class ContentsCheck:
    """Compares checksums of all values with those at the start.

    The values' bits are summed as integers, weighted by row and by column. A changed value always changes a sum; exchanged values
    do so with a probability of 1 - 2^-64. On a GPU a call starts the sums without waiting. The next call reads the result if it
    is ready, and starts them anew: where the device has ended its work before the next, the second call after a write sees it.

    Args:
        tensors: tensors to sum, on one device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._device = self._tensors[0].device
        self._expected = sums(self._tensors)
        if self._device.type == "cuda":  # a call may run on another stream
            torch.cuda.current_stream(self._device).synchronize()
        self._changed = False
        self._event: torch.cuda.Event | None = None
        self._answer = torch.zeros((), dtype=torch.bool, pin_memory=self._device.type == "cuda")

    def change(self, *, wait: bool = False) -> str | None:
        """What was changed; None if nothing was, or if the result is not ready.

        Args:
            wait: whether to wait for the device.
        """
        if self._device.type != "cuda":
            return CHANGED if not torch.equal(sums(self._tensors), self._expected) else None
        if not torch.cuda.is_current_stream_capturing():
            with torch.cuda.device(self._device):
                self._poll(wait=wait)
        return CHANGED if self._changed else None

    def _poll(self, *, wait: bool) -> None:
        if self._event is not None:
            if wait:
                self._event.synchronize()
            elif not self._event.query():
                return
            self._read()
        if self._changed:
            return
        differs = (sums(self._tensors) != self._expected).any()
        self._answer.copy_(differs, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()
        if wait:
            self._event.synchronize()
            self._read()

    def _read(self) -> None:
        """Take the answer, which is there."""
        self._changed |= bool(self._answer)
        self._event = None


def contents_checks(tensors: Sequence[torch.Tensor]) -> list[ContentsCheck]:
    """A check for each device that holds plain tensors with values."""
    plain = [tensor for tensor in tensors if has_pointer(tensor) and tensor.numel() and not tensor.is_meta]
    devices = dict.fromkeys(tensor.device for tensor in plain)
    return [ContentsCheck([tensor for tensor in plain if tensor.device == device]) for device in devices]


def sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weighted sums of the bits of tensors on one device: int64, two for each chunk."""
    with torch.no_grad():
        found = [_sum(chunk) for chunk in _chunks(tensors)]
        return torch.stack(found)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    largest = _CHUNK.get(tensors[0].device.type, 1 << 20)
    kinds = dict.fromkeys(tensor.element_size() for tensor in map(_real, tensors))
    for size in kinds:
        group: list[torch.Tensor] = []
        for words in (_flat(tensor) for tensor in map(_real, tensors) if tensor.element_size() == size):
            if group and sum(part.numel() for part in group) + words.numel() > largest:
                yield _joined(group)
                group = []
            group.append(words)
        yield _joined(group)


def _sum(words: torch.Tensor) -> torch.Tensor:
    rows = words.numel() // _COLUMNS
    table, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    by_row, by_column = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    tail = rest.to(torch.int64)
    weights = _weights(max(rows, _COLUMNS), words.device)
    left = (tail * weights[: tail.numel()]).sum()
    return torch.stack([(by_row * weights[:rows]).sum() + left, (by_column * weights[:_COLUMNS]).sum() - 3 * left])


def _weights(count: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.int64, device=device) * 2 + 1) * _ODD


def _joined(group: Sequence[torch.Tensor]) -> torch.Tensor:
    return group[0] if len(group) == 1 else torch.cat(list(group))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The values as words, in memory order if that needs no copy."""
    order = sorted(range(tensor.dim()), key=lambda side: (-tensor.stride(side), -tensor.shape[side]))
    return tensor.permute(order).reshape(-1).view(_WORDS[tensor.element_size()])
