"""Room: how much of a GPU tuning may take, and what of it goes to whom.

A limit counts everything beyond what the device holds when tuning begins. A process that uses a GPU has a CUDA context there,
tensors or not: those of the processes that tuning starts come out of the limit before any tensor does. Contexts grow with the
code that libraries load, and no allocator tells by how much: the driver is asked now and then what this process takes, and where
it does not tell, what the whole device holds is looked at (`refresh_memory_limit`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

import torch

from convoy.errors import InputError
from convoy.measurement.device.nvml import own_bytes
from convoy.measurement.failure import is_out_of_memory

CONTEXT_BYTES: Final = 640 << 20
"""A CUDA context with the code of kernels in it: 549 MB when it is new (H100, driver 580), and more with every kernel loaded."""

MIN_TENSOR_BYTES: Final = 64 << 20
"""With less for tensors there is hardly a layer that could be measured."""

MAX_CONTEXT_GROWTH: Final = 640 << 20
"""By how much contexts are taken to grow at most, where the driver does not tell whose memory it is: without a look at that,
tuning ResNet-50 took 387 MB more than its limit (H100, commit ed4e247). What the device holds beyond that is of programs that
have no part in tuning."""

SPARE_BYTES: Final = 96 << 20
"""For no tensor: contexts grow between two looks at them, too. Without it, tuning ResNet-50 at batch 128 took 84 MB more than
its limit (H100, commit 41d7abe)."""

MIN_ISOLATED_BYTES: Final = CONTEXT_BYTES + SPARE_BYTES + MIN_TENSOR_BYTES
"""The least limit under which a process of its own can measure."""

MAX_DEVICE_BUILDERS: Final = 8
"""Processes that compile on the device, at most."""

BUILDERS_FRACTION: Final = 1 / 8
"""Of a limit, for the contexts of processes that compile on the device: they save time, tensors make measuring possible."""


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """How a limit of a GPU's memory is divided.

    Attributes:
        builders: processes that compile on the device, at most; those that never see it are not limited.
        measuring: bytes for tensors in the process that measures.
        here: bytes for tensors in this process, beyond what it holds. It takes them once that process has ended.
    """

    builders: int
    measuring: int
    here: int

    @classmethod
    def of(cls, limit: int, *, isolate: bool) -> Self:
        """Divide a limit.

        Args:
            limit: bytes, `Settings.tuning_memory_bytes`.
            isolate: whether a process of its own measures; without, none is started.

        Raises:
            InputError: the process that measures would have no room.
        """
        if not isolate:
            return cls(0, limit - SPARE_BYTES, limit - SPARE_BYTES)
        if limit < MIN_ISOLATED_BYTES:
            raise InputError(
                "tuning_memory_bytes",
                f"{limit / 2**20:.0f} MiB",
                f"at least {MIN_ISOLATED_BYTES >> 20} MiB where a process of its own measures: "
                f"its CUDA context takes {CONTEXT_BYTES >> 20}",
                "Allow more, or measure in this process: Settings(isolate=False).",
            )
        builders = min(MAX_DEVICE_BUILDERS, int(BUILDERS_FRACTION * limit / CONTEXT_BYTES))
        here = limit - SPARE_BYTES - builders * CONTEXT_BYTES
        return cls(builders, here - CONTEXT_BYTES, here)


def limit_memory(most_bytes: int) -> None:
    """Let PyTorch hold so many bytes of the current GPU from now on; what asks for more is out of memory."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total))


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What PyTorch may hold of a GPU in one process.

    Attributes:
        tensors: bytes, all that it holds, where contexts are no larger than was expected.
        context: bytes of the device that this process is expected to take besides; None where the driver does not tell.
        others: bytes that all else is expected to take: this context, other processes.
    """

    tensors: int
    context: int | None
    others: int

    @classmethod
    def here(cls, limit: int, *, isolate: bool) -> Self:
        """The room of the process that tunes, from now on; raises InputError where the process that measures would have none."""
        shares, held, own = MemorySplit.of(limit, isolate=isolate), torch.cuda.memory_reserved(), own_bytes()
        context = None if own is None else own - held
        return cls(held + shares.here, context, _used_bytes() - held + shares.builders * CONTEXT_BYTES)

    @classmethod
    def of_measuring(cls, limit: int) -> Self:
        """The room of the process that measures, while this one tunes: what this one has grown by since then is not there."""
        began = _limits[-1] if _limits else cls.here(limit, isolate=True)
        shares, own = MemorySplit.of(limit, isolate=True), own_bytes()
        level, tensors, context = began.tensors + began.others, shares.measuring, None
        if began.context is not None and own is not None:
            grown = own - (began.tensors - shares.here + began.context)
            tensors, context = max(MIN_TENSOR_BYTES, tensors - max(0, grown)), CONTEXT_BYTES
        return cls(tensors, context, level - tensors)

    def keep(self) -> None:
        """Let PyTorch hold what is left of it now: what asks for more is out of memory."""
        limit_memory(max(MIN_TENSOR_BYTES, self.tensors - max(0, self.grown_bytes())))

    def grown_bytes(self) -> int:
        """Bytes by which contexts are larger than was expected."""
        held, own = torch.cuda.memory_reserved(), None if self.context is None else own_bytes()
        if own is None or self.context is None:
            return min(MAX_CONTEXT_GROWTH, _used_bytes() - held - self.others)
        return own - held - self.context


_limits: list[MemoryLimit] = []
"""Of this process, the innermost last, as there is one allocator: `torch.cuda.set_per_process_memory_fraction`."""


def _used_bytes() -> int:
    """Bytes of the current GPU that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def enter_memory_limit(room: MemoryLimit) -> None:
    """Keep to a room from now on."""
    _limits.append(room)
    room.keep()


def refresh_memory_limit() -> None:
    """Look again at what is left of this process's room, where it has one: contexts may have grown."""
    if _limits:
        _limits[-1].keep()


def lost_fraction(idle_bytes: int) -> float:
    """How much of what this process may hold is lost to it: 1 is all, 0 where there is no limit.

    Args:
        idle_bytes: what PyTorch holds while nothing is measured: a graph whose recording failed may keep what it had
            (`unfinished`). Besides, what the context has grown by is lost.
    """
    return max(0.0, (idle_bytes + _limits[-1].grown_bytes()) / _limits[-1].tensors) if _limits else 0.0


def reserve_capture_memory(stream: torch.cuda.Stream) -> None:
    """Ask for what PyTorch allocates where the recording of a CUDA graph begins, and give it back.

    Those are two numbers for the device's generator, while there is no other graph. Where they have no room, the graph is left
    half registered, and its destructor raises: the process is gone (PyTorch 2.11, `CUDAGeneratorState::unregister_graph`).

    Args:
        stream: what will be recorded, for memory belongs to streams.

    Raises:
        torch.OutOfMemoryError: there is no room for them.
    """
    with torch.cuda.stream(stream):
        asked = [torch.empty(1, dtype=torch.int64, device=stream.device) for _ in range(2)]
    del asked


@contextmanager
def memory_limited(device: str, limit: int | None, *, isolate: bool) -> Iterator[None]:
    """Let PyTorch hold no more than a limit leaves to this process (`MemoryLimit.here`), until the end of the block.

    Args:
        device: `cpu` or `cuda`; on a CPU nothing is limited.
        limit: bytes, `Settings.tuning_memory_bytes`; None: as many as before.
        isolate: whether a process of its own measures.

    Raises:
        InputError: the process that measures would have no room, or memory ended where nothing smaller can take its place.
    """
    if device != "cuda" or limit is None:
        yield
        return
    before = torch.cuda.memory.get_per_process_memory_fraction()
    enter_memory_limit(MemoryLimit.here(limit, isolate=isolate))
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        expected = (
            f"as much as the net takes while it runs ({next(iter(str(error).splitlines()), type(error).__name__)})"
        )
        raise InputError("tuning_memory_bytes", f"{limit / 2**20:.0f} MiB", expected, "Allow more.") from error
    finally:
        _limits.pop()
        torch.cuda.set_per_process_memory_fraction(before)
