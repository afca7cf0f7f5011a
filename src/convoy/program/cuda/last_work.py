"""LastWork: work on buffers that several calls share runs in the order of the calls, whichever streams they come from."""

from __future__ import annotations

import torch

StreamIds = tuple[int, ...]
"""What tells streams apart: PyTorch's identifier, device index and device type (`torch._C._cuda_getCurrentStream`)."""


class LastWork:
    """The end of the last call's work on a GPU. Calls are ordered on the host by a lock of the caller's."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._stream: StreamIds | None = None

    def precede(self, stream: torch.cuda.Stream, ids: StreamIds) -> None:
        """Let a stream wait for the last work. A stream that did that work itself need not: waiting takes 8 us of a host."""
        if ids != self._stream or not _lives_on(ids):
            stream.wait_event(self._event)

    def record(self, stream: torch.cuda.Stream, ids: StreamIds) -> None:
        """From now on the last work is all that the stream has been given so far."""
        self._event.record(stream)
        self._stream = ids


def _lives_on(ids: StreamIds) -> bool:
    """Whether a stream exists until the process ends: the default stream (identifier 0) or one of PyTorch's own (odd).

    A stream of another library may be destroyed, and a new one may get its address.
    """
    return ids[0] == 0 or ids[0] % 2 == 1
