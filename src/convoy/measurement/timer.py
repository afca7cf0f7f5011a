"""Times launches in interleaved rounds: A B C A B C ..., each sample long enough for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from convoy.measurement.protocol import Protocol
from convoy.measurement.statistics import steady_rounds

Launch = Callable[[], object]

GRAPH_LAUNCHES = 20
"""Launches in one captured graph on a GPU: enough to hide the graph's own start (about 5 us) from kernels of a few us."""


def first_run_us(launch: Launch, device: str) -> float:
    """Time of one launch after one warm-up, by the host's clock with the device drained: what pruning looks at."""
    launch()
    return _host_us(launch, 1, device)


def time_rounds(launches: Sequence[Launch], protocol: Protocol, rounds: int, device: str) -> list[list[float]]:
    """Microseconds of one launch for each candidate, a list of samples each, disturbed rounds dropped.

    On a CPU each sample repeats the launch until `protocol.least_us` have passed. On a GPU each candidate is captured in a
    graph of several launches, and replays are timed by events, so that the host's launch cost stays out.
    """
    runs = [_prepare(launch, protocol, device) for launch in launches]
    found: list[list[float]] = []
    for index in range(rounds + 1):
        times = [run() for run in runs]
        if index:  # the first round warms caches and clocks
            found.append(times)
    kept = steady_rounds(found)
    return [list(samples) for samples in zip(*kept, strict=True)]


def _prepare(launch: Launch, protocol: Protocol, device: str) -> Callable[[], float]:
    if device == "cuda":
        return _captured(launch)
    once = max(_host_us(launch, 1, device), 0.1)
    repeats = max(1, round(protocol.least_us / once))
    return lambda: _host_us(launch, repeats, device)


def _host_us(launch: Launch, repeats: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(repeats):
        launch()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / 1e3 / repeats


def _captured(launch: Launch) -> Callable[[], float]:
    """A graph of several launches; a call replays it once and gives microseconds a launch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(GRAPH_LAUNCHES):
                launch()
    torch.cuda.current_stream().wait_stream(stream)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / GRAPH_LAUNCHES

    return replay
