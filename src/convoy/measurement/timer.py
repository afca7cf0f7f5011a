"""Times launches in interleaved rounds, A B C A B C ..., each sample long enough for the clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Sequence
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
"""Most launches in one sample."""

GRAPH_LAUNCHES: Final = 64
"""Most launches in one captured graph: capturing costs about 10 µs each, and 64 launches hide a graph's own start even for
kernels of a few microseconds."""

GRAPH_START_US: Final = 5.0
"""About the time of a graph's start besides its launches."""


def first_run_us(launch: LaunchFunction, device: str) -> float:
    """Time of one launch after an untimed one, by the host's clock with the device synchronized; used for pruning."""
    launch()
    return _wall_us(launch, 1, device)


def replayed_us(launch: LaunchFunction) -> float:
    """Time of one launch on a GPU, captured and replayed, without the host's launch time: the least of three.

    The wrappers of Inductor and cuDNN take 100 to 300 µs on the host for kernels of 10 µs (H100). A host that is late between
    the first event and the replay counts too: it made 384 µs of 8 (commit 92def7f2).
    """
    graph = captured(launch, 1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    found: list[float] = []
    for _ in range(3):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return min(found)


def launches_in_graph(once_us: float, min_sample_us: int) -> int:
    """Number of launches in a graph: two samples' worth, so that the graph's own start is at most a hundredth.

    Args:
        once_us: time of one replayed launch, not the host's: a launch through Inductor takes the host ten times as long as a
            Triton launch, and graphs with fewer launches would include a larger share of their start.
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
        announce: called with the candidate's index before its launches, so that a crash or a hang can be attributed.

    Returns:
        For each candidate its samples, microseconds of one launch, one per round.
    """
    with _without_garbage_collection():
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
def _without_garbage_collection() -> Generator[None]:
    """No garbage collection during timing: it would be counted for one candidate."""
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
    # One untimed launch first: the previous candidates left their data in the caches. It does not matter for a launch
    # that fills a sample alone.
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
    """Capture several launches; a sample replays them, several times if one replay is too short, and reads the events."""
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
        if once < protocol.min_sample_us:  # other candidates have used the caches meanwhile
            graph.replay()
        return replay(times) / times / launches

    return sample


def captured(launch: LaunchFunction, launches: int) -> torch.cuda.CUDAGraph:
    """A graph of several launches, captured on a stream of its own as PyTorch requires.

    It does not use the context manager `torch.cuda.graph`, which first returns all cached memory to the driver: a candidate
    then took 21 ms instead of 17 ms (H100), and the next one had to allocate that memory again.

    Raises:
        torch.OutOfMemoryError: memory does not suffice for the graph or for a launch.
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
