"""How much of a GPU's memory tuning may take, and how it is divided between processes.

A limit counts everything beyond what the device holds when tuning begins. Every process that uses a GPU has a CUDA context
there, with or without tensors: the contexts of the processes that tuning starts are subtracted from the limit first. Contexts
grow with the code that libraries load, and no allocator reports by how much. So Convoy asks the driver from time to time how
much this process uses; if per-process memory is unavailable (some containers), it uses the device's total
(`refresh_memory_limit`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

import torch

from convoy.errors import InputError
from convoy.measurement.device.nvml import own_bytes
from convoy.measurement.failure import is_out_of_memory
from convoy.typed_torch import gpu_properties, set_memory_fraction

CONTEXT_BYTES: Final = 640 << 20
"""A CUDA context with loaded kernels: 549 MB when it is new (H100, driver 580), and more with every kernel loaded."""

MIN_TENSOR_BYTES: Final = 64 << 20
"""With less memory for tensors, hardly any layer could be measured."""

MAX_CONTEXT_GROWTH: Final = 640 << 20
"""Largest growth of contexts that is assumed if the driver does not report memory per process. Without this check, tuning
ResNet-50 took 387 MB more than its limit (H100, commit ed4e247). Anything the device holds beyond that belongs to other
programs."""

SPARE_BYTES: Final = 96 << 20
"""Reserved, not for tensors: contexts also grow between two checks. Without it, tuning ResNet-50 at batch 128 took 84 MB more
than its limit (H100, commit 41d7abe)."""

MIN_ISOLATED_BYTES: Final = CONTEXT_BYTES + SPARE_BYTES + MIN_TENSOR_BYTES
"""The least limit under which a separate process can measure."""

MAX_DEVICE_BUILDERS: Final = 8
"""Most processes that compile on the device."""

BUILDERS_FRACTION: Final = 1 / 8
"""Share of a limit for the contexts of processes that compile on the device: they only save time, while tensors make
measuring possible."""


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """How a limit on a GPU's memory is divided.

    Attributes:
        builders: most processes that compile on the device; processes that do not see it are not limited.
        measuring: bytes for tensors in the measuring process.
        here: bytes for tensors in this process beyond what it already holds, used after the measuring process has ended.
    """

    builders: int
    measuring: int
    here: int

    @classmethod
    def of(cls, limit: int, *, isolate: bool) -> Self:
        """Divide a limit.

        Args:
            limit: bytes, `Settings.tuning_memory_bytes`.
            isolate: whether a separate process measures; if not, none is started.

        Raises:
            InputError: the measuring process would have too little memory.
        """
        if not isolate:
            return cls(0, limit - SPARE_BYTES, limit - SPARE_BYTES)
        if limit < MIN_ISOLATED_BYTES:
            raise InputError(
                "tuning_memory_bytes",
                f"{limit / 2**20:.0f} MiB",
                f"at least {MIN_ISOLATED_BYTES >> 20} MiB if a separate process measures: "
                f"its CUDA context takes {CONTEXT_BYTES >> 20}",
                "Allow more, or measure in this process: Settings(isolate=False).",
            )
        builders = min(MAX_DEVICE_BUILDERS, int(BUILDERS_FRACTION * limit / CONTEXT_BYTES))
        here = limit - SPARE_BYTES - builders * CONTEXT_BYTES
        return cls(builders, here - CONTEXT_BYTES, here)


def limit_memory(most_bytes: int) -> None:
    """Let PyTorch hold at most this many bytes of the current GPU from now on; larger requests run out of memory."""
    total = gpu_properties(torch.cuda.current_device()).total_memory
    set_memory_fraction(min(1.0, most_bytes / total))


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory that PyTorch may hold of a GPU in one process.

    Attributes:
        tensors: bytes that it may hold in all, if contexts are as large as expected.
        context: expected bytes of the device that this process uses besides; None if the driver does not report them.
        others: expected bytes of everything else: this context, other processes.
    """

    tensors: int
    context: int | None
    others: int

    @classmethod
    def here(cls, limit: int, *, isolate: bool) -> Self:
        """The limit of the tuning process from now on.

        Raises InputError if the measuring process would have too little memory.
        """
        shares, held, own = MemorySplit.of(limit, isolate=isolate), torch.cuda.memory_reserved(), own_bytes()
        context = None if own is None else own - held
        return cls(held + shares.here, context, _used_bytes() - held + shares.builders * CONTEXT_BYTES)

    @classmethod
    def of_measuring(cls, limit: int) -> Self:
        """The limit of the measuring process while this one tunes; the growth of this process since then is subtracted."""
        began = _limits[-1] if _limits else cls.here(limit, isolate=True)
        shares, own = MemorySplit.of(limit, isolate=True), own_bytes()
        level, tensors, context = began.tensors + began.others, shares.measuring, None
        if began.context is not None and own is not None:
            grown = own - (began.tensors - shares.here + began.context)
            tensors, context = max(MIN_TENSOR_BYTES, tensors - max(0, grown)), CONTEXT_BYTES
        return cls(tensors, context, level - tensors)

    def apply(self) -> None:
        """Let PyTorch hold what is left now; larger requests run out of memory."""
        limit_memory(max(MIN_TENSOR_BYTES, self.tensors - max(0, self.grown_bytes())))

    def grown_bytes(self) -> int:
        """Bytes by which contexts are larger than expected."""
        held, own = torch.cuda.memory_reserved(), None if self.context is None else own_bytes()
        if own is None or self.context is None:
            return min(MAX_CONTEXT_GROWTH, _used_bytes() - held - self.others)
        return own - held - self.context


_limits: list[MemoryLimit] = []
"""The limits of this process, the innermost last; one for each nested block, because there is one allocator
(`torch.cuda.set_per_process_memory_fraction`)."""


def _used_bytes() -> int:
    """Bytes of the current GPU that are in use, by any process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def enter_memory_limit(limit: MemoryLimit) -> None:
    """Apply a limit from now on."""
    _limits.append(limit)
    limit.apply()


def refresh_memory_limit() -> None:
    """Apply this process's limit again, if there is one: contexts may have grown."""
    if _limits:
        _limits[-1].apply()


def lost_fraction(idle_bytes: int) -> float:
    """Share of this process's memory limit that is lost to it, up to 1; 0 without a limit.

    Args:
        idle_bytes: bytes that PyTorch holds while nothing is measured: a graph whose capture failed may keep its memory
            (`capture_recovery`). The growth of the context is lost too.
    """
    return max(0.0, (idle_bytes + _limits[-1].grown_bytes()) / _limits[-1].tensors) if _limits else 0.0


def reserve_capture_memory(stream: torch.cuda.Stream) -> None:
    """Allocate and free what PyTorch allocates at the beginning of a CUDA graph capture.

    These are two numbers for the device's generator, while there is no other graph. If they do not fit, the graph stays half
    registered, and its destructor raises, which ends the process (PyTorch 2.11, `CUDAGeneratorState::unregister_graph`).

    Args:
        stream: the stream to be captured, because cached memory belongs to streams.

    Raises:
        torch.OutOfMemoryError: memory does not suffice for them.
    """
    with torch.cuda.stream(stream):
        asked = [torch.empty(1, dtype=torch.int64, device=stream.device) for _ in range(2)]
    del asked


@contextmanager
def memory_limited(device: str, limit: int | None, *, isolate: bool) -> Generator[None]:
    """Let PyTorch hold no more than a limit leaves to this process (`MemoryLimit.here`), until the end of the block.

    Args:
        device: `cpu` or `cuda`; on a CPU nothing is limited.
        limit: bytes, `Settings.tuning_memory_bytes`; None: no limit.
        isolate: whether a separate process measures.

    Raises:
        InputError: the measuring process would have too little memory, or this process ran out of memory for the net itself.
    """
    if device != "cuda" or limit is None:
        yield
        return
    before = torch.cuda.memory.get_per_process_memory_fraction()
    enter_memory_limit(MemoryLimit.here(limit, isolate=isolate))
    try:
        yield
    except Exception as error:  # everything: out of memory has several types; any other error is raised again
        if not is_out_of_memory(error):
            raise
        expected = (
            f"as much as the net takes while it runs ({next(iter(str(error).splitlines()), type(error).__name__)})"
        )
        raise InputError("tuning_memory_bytes", f"{limit / 2**20:.0f} MiB", expected, "Allow more.") from error
    finally:
        _limits.pop()
        set_memory_fraction(before)
