"""Recordings that run out of memory, in a process of their own: run from `test_unfinished_on_gpu.py`. Not a test module.

What they leave behind stays as long as the process, and used to end it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import suppress

import torch

from convoy.measurement import capture_recovery
from convoy.measurement.failure import is_out_of_memory
from convoy.measurement.timer import captured
from convoy.program.cuda.recording import recording

ROOM = 64 << 20
PIECE = 24 << 20
"""Of the room; twice, and a third time there is none left."""


class Growing:
    """A launch that takes more than there is, wherever it is recorded.

    Args:
        piece: bytes that it takes at a time.
        waits: whether it waits for the device then, as one that frees memory would: the recording cannot be ended.
    """

    def __init__(self, piece: int, *, waits: bool) -> None:
        self._piece, self._waits = piece, waits

    def __call__(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            return
        taken: list[torch.Tensor] = []
        try:
            taken.extend(torch.zeros(self._piece, dtype=torch.uint8, device="cuda") for _ in range(8))
        except torch.OutOfMemoryError:
            if self._waits:
                with suppress(RuntimeError):
                    torch.cuda.synchronize()
            raise


def by_hand(launch: Callable[[], None]) -> None:
    captured(launch, 2)


def as_programs_do(launch: Callable[[], None]) -> None:
    with recording(torch.cuda.CUDAGraph(), torch.cuda.Stream()):
        launch()


def limit(more: int) -> None:
    """Let PyTorch hold so many bytes more than it does."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)


def failure(run: Callable[[], None]) -> BaseException:
    """The error that it raises, without the frames that hold the memory it took."""
    try:
        run()
    except RuntimeError as error:
        return error.with_traceback(None)
    raise AssertionError("it had room")


def still_draws() -> bool:
    return not torch.equal(torch.randn(64, device="cuda"), torch.randn(64, device="cuda"))


def alone(way: Callable[[Callable[[], None]], None], *, waits: bool) -> None:
    """Recordings with pools of their own: all that they took can be had again."""
    x = torch.ones(3, device="cuda")
    first = captured(lambda: x.add_(1), 1)  # while there is one, PyTorch has its two numbers for the generator
    assert still_draws()
    torch.empty(200 << 20, dtype=torch.uint8, device="cuda")  # cached: it must not be lost either
    limit(ROOM)
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        error = failure(lambda: way(Growing(PIECE, waits=waits)))
        assert is_out_of_memory(error), repr(error)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == before, (torch.cuda.memory_reserved(), before)
        assert still_draws()
        pinned = torch.ones(1 << 20).pin_memory()  # its allocator asks graphs, too
        again = captured(lambda: x.mul_(2), 2)
        again.replay()
        assert pinned.to("cuda").sum().item() == 1 << 20
        x.fill_(1)
        first.replay()
        assert x.tolist() == [2.0] * 3
        del pinned, again
    if waits:
        assert len(capture_recovery._UNFINISHED) == 3


def shared() -> None:
    """A recording into the pool of another graph, which stays that graph's."""
    stream, x = torch.cuda.Stream(), torch.ones(1 << 20, device="cuda")
    first, second, third = (torch.cuda.CUDAGraph() for _ in range(3))
    with recording(first, stream):
        y = x + 1
    limit(ROOM)

    def into_it() -> None:
        with recording(second, stream, first.pool()):
            Growing(PIECE, waits=True)()

    assert is_out_of_memory(failure(into_it))
    with suppress(RuntimeError), recording(third, stream, first.pool()):  # PyTorch 2.11 refuses that from now on
        x.add(2)
    gc.collect()
    torch.cuda.empty_cache()
    others = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
    first.replay()
    assert bool((y == 2).all())
    assert not others.any()
    assert still_draws()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["shared"]:
            shared()
        case [way, waits]:
            alone({"by_hand": by_hand, "as_programs_do": as_programs_do}[way], waits=waits == "waits")
    torch.cuda.synchronize()
