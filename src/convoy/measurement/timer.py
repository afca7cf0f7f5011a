"""Times launches in interleaved rounds, A B C A B C ..., each sample long enough for the clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from convoy.measurement.capture_recovery import record_graph, recover_failed_capture
from convoy.measurement.device.memory_limit import reserve_capture_memory
from convoy.measurement.protocol import Protocol

LaunchFunction = Callable[[], object]
Sample = Callable[[], float]
"""Takes one sample: microseconds of one launch."""

MAX_REPEATS: Final = 1000
"""Launches in one sample, at most."""

GRAPH_LAUNCHES: Final = 64
"""Launches in one captured graph, at most: capturing costs about 10 µs each, and a graph's own start is hidden from kernels of a
few microseconds by then."""

GRAPH_START_US: Final = 5.0
"""About what a graph's start takes beside its launches."""


def first_run_us(launch: LaunchFunction, device: str) -> float:
    """Time of one launch after one that is not timed, by the host's clock with the device drained: what pruning looks at."""
    launch()
    return _wall_us(launch, 1, device)


def replayed_us(launch: LaunchFunction) -> float:
    """Time of one launch on a GPU, captured and replayed: without what the host needs to launch it.

    Inductor's wrappers and cuDNN's take 100 to 300 µs on the host for kernels of 10 µs (H100).
    """
    graph = captured(launch, 1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def launches_in_graph(once_us: float, min_sample_us: int) -> int:
    """How many launches a graph gets: two samples' worth, so that its own start is a hundredth of them or less.

    Args:
        once_us: time of one launch, replayed, never the host's: a launch through Inductor takes the host ten times as long as one
            of Triton's, and graphs of fewer launches would charge it more of their starts.
        min_sample_us: see `Protocol`.
    """
    return min(GRAPH_LAUNCHES, max(1, round(2 * min_sample_us / max(once_us, 0.1))))


def time_rounds(
    launches: Sequence[LaunchFunction],
    protocol: Protocol,
    rounds: int,
    device: str,
    announce: Callable[[int], None] = lambda _: None,
) -> list[list[float]]:
    """Time candidates in turn.

    Args:
        launches: one for each candidate; it launches once, on the current stream.
        protocol: the clock and the least length of a sample.
        rounds: samples to take of each.
        device: `cpu` or `cuda`.
        announce: told the candidate's index before its launches, so that a crash or a hang has a name.

    Returns:
        For each candidate its samples, microseconds of one launch, one a round.
    """
    with _steady_interpreter():
        samplers: list[Sample] = []
        for index, launch in enumerate(launches):
            announce(index)
            samplers.append(_sampler(launch, protocol, device))
        found: list[list[float]] = [[] for _ in launches]
        for _ in range(rounds):
            for index, sample in enumerate(samplers):
                announce(index)
                found[index].append(sample())
        return found


@contextmanager
def _steady_interpreter() -> Iterator[None]:
    """No garbage collection while the clock runs: it would fall on whoever is being timed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _sampler(launch: LaunchFunction, protocol: Protocol, device: str) -> Sample:
    if protocol.clock == "graph":
        return _graph_sampler(launch, launches_in_graph(replayed_us(launch), protocol.min_sample_us), protocol)
    once = max(first_run_us(launch, device), 0.1)
    repeats = min(max(1, round(protocol.min_sample_us / once)), MAX_REPEATS)
    if protocol.clock == "events":
        return lambda: _event_us(launch, repeats)
    # A launch before the timed ones: the candidates before have left their own data in the caches. One launch that fills a
    # sample alone does not notice.
    lead = launch if repeats > 1 else None
    return lambda: _wall_us(launch, repeats, device, lead)


def _wall_us(launch: LaunchFunction, repeats: int, device: str, lead: LaunchFunction | None = None) -> float:
    if lead is not None:
        lead()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(repeats):
        launch()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / 1e3 / repeats


def _event_us(launch: LaunchFunction, repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launch()
    start.record()
    for _ in range(repeats):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def _graph_sampler(launch: LaunchFunction, launches: int, protocol: Protocol) -> Sample:
    """Capture several launches; a sample replays them, several times where one replay is too short, and asks the events."""
    graph = captured(launch, launches)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    replay(1)
    once = max(replay(1), 1.0)
    times = min(MAX_REPEATS, max(1, round(protocol.min_sample_us / once)))

    def sample() -> float:
        if once < protocol.min_sample_us:  # as on a CPU: other candidates have used the caches meanwhile
            graph.replay()
        return replay(times) / times / launches

    return sample


def captured(launch: LaunchFunction, launches: int) -> torch.cuda.CUDAGraph:
    """A graph of several launches, made on a stream of its own as torch demands.

    Begun by hand: the context manager `torch.cuda.graph` gives all cached memory back to the driver first, which made a candidate
    take 21 ms where it takes 17 ms without (H100), and whose pieces the next one must ask for again.

    Raises:
        torch.OutOfMemoryError: there is no room for it, or for a launch.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        launch()
        torch.cuda.synchronize()
        reserve_capture_memory(stream)
        with recover_failed_capture(record_graph(graph, stream, pool), graph, stream.device, pool):
            for _ in range(launches):
                launch()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
