"""Clocks of data-parallel training: rounds of all processes, the link, launches, and how collectives lie beside other kernels."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from convoy.typed_torch import all_reduce, barrier

Step = Callable[[], object]
Kernel = tuple[str, float, float]
"""A kernel's name, its beginning and its end, microseconds."""

COLLECTIVE: Final = "nccl"
"""Prefixes of the names of NCCL's kernels, in lower case."""

WARM_UPS: Final = 3
LINK_BYTES: Final = {"cuda": 256 << 20, "cpu": 16 << 20}
"""Size of the all-reduce that tells the link's speed: large enough that latency does not count."""


def wait(device: torch.device) -> None:
    """Until all that was launched is through."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(step: Step, device: torch.device) -> float | None:
    """The peak of some steps alone, without their preparation (Convoy checks its gradients in float64)."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UPS):
        step()
    wait(device)
    return float(torch.cuda.max_memory_allocated(device))


def _seconds(step: Step, count: int, device: torch.device) -> float:
    barrier()
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return (time.perf_counter() - start) / count


def slowest_s(step: Step, count: int, device: torch.device) -> float:
    """Seconds a step of the slowest process."""
    return agreed(_seconds(step, count, device), device)


def agreed(value: float, device: torch.device) -> float:
    """The largest over the processes."""
    held = torch.tensor([value], dtype=torch.float64, device=device)
    all_reduce(held, dist.ReduceOp.MAX)
    return float(held.item())


def steps_a_round(step: Step, round_s: float, device: torch.device) -> int:
    """Steps that make a round long enough; the same number on all processes, or they would wait for each other for ever."""
    return max(1, round(round_s / max(slowest_s(step, 2, device), 1e-6)))


def link(gradient_bytes: int, device: torch.device) -> dict[str, float]:
    """Time of an all-reduce of the gradients' bytes alone, and the bus speed of a large one: 2 (n-1) / n of its bytes."""
    world = dist.get_world_size()
    if world == 1:
        return {}
    own = torch.zeros(max(1, gradient_bytes // 4), device=device)
    large = torch.zeros(LINK_BYTES[device.type] // 4, device=device)
    own_s, large_s = (_fastest(partial(all_reduce, t), device) for t in (own, large))
    moved = 2 * (world - 1) / world * large.numel() * 4
    return {"allreduce_ms": 1e3 * own_s, "link_gb_per_s": moved / large_s / 1e9}


def _fastest(step: Step, device: torch.device) -> float:
    step()
    return min(slowest_s(step, 3, device) for _ in range(5))


def launches(step: Step, device: torch.device) -> dict[str, float]:
    """The host's time to launch a step, and the GPU's waiting time: the step's time minus that of its kernels."""
    if device.type != "cuda":
        return {}
    wait(device)
    start = time.perf_counter()
    step()
    host_s = time.perf_counter() - start
    wait(device)
    whole_s = min(_seconds(step, 3, device) for _ in range(3))
    found = {"host_ms": 1e3 * host_s}
    with contextlib.suppress(RuntimeError):  # a machine that lets nobody profile
        busy_s = _busy_s(step, device)
        if busy_s:
            found["launch_ms"] = 1e3 * max(0.0, whole_s - busy_s)
    return found


def collectives(step: Step, device: torch.device, *, able: bool) -> dict[str, float]:
    """How long a step's collectives run, and how long nothing else does meanwhile.

    Args:
        step: with all-reduce; all processes make it together.
        device: this process's own.
        able: whether this process may profile; the figures are left out unless all may.
    """
    if dist.get_world_size() == 1 or agreed(float(not able), device):
        return {}
    return collective_ms(_kernels(step, device))


def collective_ms(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Of a step's kernels: time in which a collective runs, and in which it runs alone, milliseconds; empty where none runs."""
    spans = [(start, stop) for _, start, stop in kernels]
    own = [(start, stop) for name, start, stop in kernels if COLLECTIVE in name.lower()]
    others = [(start, stop) for name, start, stop in kernels if COLLECTIVE not in name.lower()]
    if not own:
        return {}
    return {"collective_ms": union_us(own) / 1e3, "bare_ms": (union_us(spans) - union_us(others)) / 1e3}


def _busy_s(step: Step, device: torch.device) -> float:
    """Seconds of a step in which at least one kernel runs."""
    return union_us([(start, stop) for _, start, stop in _kernels(step, device)]) / 1e6


def _kernels(step: Step, device: torch.device) -> list[Kernel]:
    """Kernels that run on the device in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        wait(device)
    events: Iterable[Any] = cast("Any", profile).events()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == cast("Any", torch.autograd).DeviceType.CUDA
    ]


def union_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
