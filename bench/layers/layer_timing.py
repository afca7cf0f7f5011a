"""How single layers are timed: every variant built in parallel processes, checked, timed in a graph, the best again in turn.

A figure is one launch inside one captured CUDA graph of `LAUNCHES` over rotating buffers: as many sets as exceed twice the L2
cache, so that weights come from memory as in a net. Peers are cuDNN's plans, each as a candidate of its own (`cudnn`), and
PyTorch with `cudnn.benchmark` (`aten`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import BaseContext

import torch
from bench.layers.layer_data import Data, Layer, check

from convoy.engines.base import Engine, Executable
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import ConvoyError
from convoy.problem import Knobs
from convoy.target import Target

LAUNCHES = 40
ROUNDS = 15
PEERS = ("cudnn", "aten")

"""Engines that are not offered yet: they wait for their first run on a device."""

OURS = [engine for engine in MANIFEST if engine.startswith(("triton.", "cuda."))]
"""Ids of our own kernels."""


def engine_of(engine_id: str) -> Engine:
    """An engine by id."""
    return load_engine(engine_id)


@dataclass(frozen=True)
class Variant:
    """One config for one problem."""

    problem: Layer
    engine: str
    knobs: Knobs


def variants(problem: Layer, engines: Sequence[str], target: Target, keep: int) -> list[Variant]:
    """The likely best configs of each engine that takes the problem."""
    found: list[Variant] = []
    for engine_id in engines:
        engine = engine_of(engine_id)
        if engine.supports(problem, target):
            found += [Variant(problem, engine_id, knobs) for knobs in list(engine.space(problem, target))[:keep]]
    return found


def _compile(variant: Variant, target: Target) -> str:
    """Build in a child process, for the compilers' caches; the reason where that fails."""
    try:
        engine_of(variant.engine).build(variant.problem, variant.knobs, target)
    except ConvoyError as error:
        return str(error).splitlines()[0]
    return ""


def _children() -> BaseContext:
    """How child processes are made: forks of this one, which need no imports; of a fresh one once this one uses a GPU."""
    return get_context("forkserver" if torch.cuda.is_initialized() else "fork")


class Builders:
    """Child processes that fill the compilers' caches."""

    def __init__(self, jobs: int) -> None:
        self._pool = ProcessPoolExecutor(jobs, mp_context=_children())

    def submit(self, found: Sequence[Variant], target: Target) -> dict[Variant, Future[str]]:
        """Start building, in order."""
        return {variant: self._pool.submit(_compile, variant, target) for variant in found}

    def close(self) -> None:
        """Forget what has not been begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def device_facts() -> tuple[Target, float, dict[str, float], int]:
    """The device, found and measured by a child process: bytes a second, FLOP a second by dtype, bytes of L2 cache."""
    with ProcessPoolExecutor(1, mp_context=_children()) as pool:
        return pool.submit(_facts).result()


def _facts() -> tuple[Target, float, dict[str, float], int]:
    from convoy.measurement.device.detect import detect_target
    from convoy.measurement.device.peaks import peaks

    target = detect_target("cuda")
    found = peaks(target)
    return target, found.bytes_per_s, found.flops, target.cache_bytes


def floor_us(problem: Layer, bytes_per_s: float, flops: dict[str, float]) -> float:
    """The roofline from memory: buffers rotate, so that every byte comes from there."""
    from convoy.measurement.device.peaks import Peaks
    from convoy.measurement.device.peaks import floor_us as roofline

    return roofline(problem, Peaks(bytes_per_s, flops))


def captured(launch: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    """LAUNCHES launches in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(2):
            launch(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(LAUNCHES):
                launch(i)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
    """Microseconds a launch, of each of several replays."""
    samples = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / LAUNCHES)
    return samples


class Timed:
    """An executable in a graph over the rotating buffers; holds what the graph reads."""

    def __init__(self, executable: Executable, data: Data) -> None:
        size = executable.workspace_bytes
        self.workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
        self.buffers = [given.buffers(executable) for given in data.sets]
        self.graph = captured(lambda i: executable.launch(self.buffers[i % len(self.buffers)], self.workspace))

    def us(self, times: int) -> list[float]:
        """Microseconds a launch."""
        return replay_us(self.graph, times)


@dataclass
class Outcome:
    """What became of one variant."""

    variant: Variant
    status: str
    us: float = float("nan")
    error: float = float("nan")
    guess: float = float("nan")


def run_us(executable: Executable, data: Data) -> float:
    """One launch by the host's clock: enough to see that a plan is hopeless (some of cuDNN's take half a second)."""
    size = executable.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
    buffers = data.sets[0].buffers(executable)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    executable.launch(buffers, workspace)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


HOPELESS_US = 20_000.0
"""A single launch over this is not timed further: the longest layer of these nets takes a tenth."""


def try_one(variant: Variant, refused: str, data: Data, target: Target, hopeless_us: float = HOPELESS_US) -> Outcome:
    """Check and quickly time one variant; over `hopeless_us`, one launch by the host's clock is its time."""
    engine = engine_of(variant.engine)
    guess = engine.estimate_us(variant.problem, variant.knobs, target) or float("nan")
    if refused:
        return Outcome(variant, refused, guess=guess)
    try:
        executable = engine.build(variant.problem, variant.knobs, target)
        size = executable.workspace_bytes
        error, wrong = check(executable, data, torch.empty(size, dtype=torch.uint8, device="cuda") if size else None)
        if wrong:
            return Outcome(variant, wrong, error=error, guess=guess)
        once = run_us(executable, data)
        if once > hopeless_us:
            return Outcome(variant, "slow", once, error, guess)
        timed = Timed(executable, data)
    except (ConvoyError, torch.cuda.OutOfMemoryError) as failure:
        return Outcome(variant, str(failure).splitlines()[0], guess=guess)
    timed.us(1)
    return Outcome(variant, "ok", statistics.median(timed.us(4)), error, guess)


def peers(problem: Layer, target: Target) -> Iterator[Variant]:
    """CuDNN's plans and PyTorch's own way. Asks cuDNN, so it needs the device."""
    for engine_id in PEERS:
        engine = engine_of(engine_id)
        if engine.supports(problem, target):
            yield from (Variant(problem, engine_id, knobs) for knobs in engine.space(problem, target))


def finals(outcomes: Sequence[Outcome], data: Data, target: Target, each: int = 2) -> dict[Variant, list[float]]:
    """The best few of each engine in turn: samples by variant."""
    graphs: dict[Variant, Timed] = {}
    for engine_id in dict.fromkeys(outcome.variant.engine for outcome in outcomes):
        own = sorted((o for o in outcomes if o.variant.engine == engine_id and o.status == "ok"), key=lambda o: o.us)
        for outcome in own[:each]:
            v = outcome.variant
            graphs[v] = Timed(engine_of(v.engine).build(v.problem, v.knobs, target), data)
    samples: dict[Variant, list[float]] = {variant: [] for variant in graphs}
    for _ in range(ROUNDS):
        for variant, timed in graphs.items():
            samples[variant] += timed.us(1)
    return samples


def sets_of(problem: Layer, cache_bytes: int) -> int:
    """Sets of buffers that rotate: together over twice the cache, and at least two."""
    return min(LAUNCHES, max(2, -(-2 * cache_bytes // max(1, problem.bytes_min))))


def best_by_engine(samples: dict[Variant, list[float]]) -> dict[str, tuple[float, Variant]]:
    """The best median of each engine with its variant."""
    best: dict[str, tuple[float, Variant]] = {}
    for variant, values in samples.items():
        median = statistics.median(values)
        if variant.engine not in best or median < best[variant.engine][0]:
            best[variant.engine] = (median, variant)
    return best


def verdict(best: dict[str, tuple[float, Variant]]) -> tuple[str, float, float]:
    """Our fastest engine, its time, and the fastest peer's; NaN where there is none."""
    ours = [(us, engine) for engine, (us, _) in best.items() if engine not in PEERS]
    theirs = [us for engine, (us, _) in best.items() if engine in PEERS]
    us, engine = min(ours) if ours else (float("nan"), "none")
    return engine, us, min(theirs) if theirs else float("nan")
