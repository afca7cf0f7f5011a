"""Single convolutions on one GPU: every candidate of our engines beside the best that cuDNN offers through torch.

Usage: python bench/layers.py RUN [RUN ...] [--engines ID ...] [--keep 12] [--jobs 16] [--seconds 400] [--candidates FILE.csv]
                              [--folder DIR]

A RUN is DTYPE:NUMERICS:BATCH:NET,NET,... with nets of bench/layers (`targets` is one) or linear layers as CxK:
fp16:half:1:resnet50,vgg19 or fp32:strict:1:4096x1000.

Builds every candidate in parallel processes, checks each against float64 (integers exactly, normal data by norm), times the
right ones as launches inside one captured CUDA graph over rotating buffers (as many sets as exceed twice the L2 cache, so
that weights come from memory as in a net), then the best few again in turn with cuDNN. A row a figure goes to
bench/results/layers-DEVICE.csv; `--candidates` keeps the time of every single candidate.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from make_layers import COLUMNS as SIZES
from record import Recorder
from torch.nn import functional

from convoy.engines.base import Buffers, Executable
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import ConvoyError
from convoy.problem import ConvProblem, Knobs, LinearProblem
from convoy.target import Target

FOLDER = Path(__file__).parent / "layers"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAUNCHES = 40
ROUNDS = 15
L2_BYTES = 50 << 20
Layer = ConvProblem | LinearProblem


@dataclass(frozen=True)
class Candidate:
    """One config for one problem."""

    problem: Layer
    engine: str
    knobs: Knobs


def problems(run: str) -> list[Layer]:
    """A run's layers, each once."""
    dtype, numerics, batch, names = run.split(":")
    found: dict[Layer, None] = {}
    for name in names.split(","):
        if name.replace("x", "").isdigit():
            c, k = map(int, name.split("x"))
            found[LinearProblem(int(batch), c, k, dtype, numerics)] = None
            continue
        with (FOLDER / f"{name}.csv").open() as file:
            for row in csv.DictReader(file):
                sizes: dict[str, Any] = {size: int(row[size]) for size in SIZES} | {"n": int(batch)}
                types: dict[str, Any] = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype)
                found[ConvProblem(**sizes, **types, layout="nhwc", numerics=numerics)] = None
    return list(found)


def candidates(problem: Layer, engines: list[str], target: Target, keep: int) -> list[Candidate]:
    """The likely best configs of each engine that takes the problem."""
    found = []
    for engine_id in engines:
        engine = load_engine(engine_id)
        if engine.supports(problem, target):
            found += [Candidate(problem, engine_id, knobs) for knobs in list(engine.space(problem, target))[:keep]]
    return found


def compile_one(candidate: Candidate, target: Target) -> str:
    """Build in a child process, for Triton's cache; the reason where that fails."""
    try:
        load_engine(candidate.engine).build(candidate.problem, candidate.knobs, target)
    except ConvoyError as error:
        return str(error).splitlines()[0]
    return ""


def compile_all(found: list[Candidate], target: Target, jobs: int) -> dict[Candidate, str]:
    """Fill Triton's cache in parallel; no CUDA is touched before the children are there."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        done = pool.map(compile_one, found, itertools.repeat(target), chunksize=4)
        return dict(zip(found, done, strict=True))


@dataclass
class Data:
    """Buffers of one problem on the device: `sets` rotate."""

    problem: Layer
    x: list[torch.Tensor]
    weight: list[torch.Tensor]
    y: list[torch.Tensor]
    integer: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    normal: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @staticmethod
    def of(problem: Layer) -> Data:
        """Random data and its float64 results."""
        dtype = DTYPES[problem.x_spec.dtype]
        sets = min(LAUNCHES, max(2, -(-2 * L2_BYTES // max(1, problem.bytes_min))))
        nhwc = {} if isinstance(problem, LinearProblem) else {"memory_format": torch.channels_last}

        def normal(shape: tuple[int, ...], scale: float) -> torch.Tensor:
            return (torch.randn(shape, device="cuda") * scale).to(dtype)

        def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return conv(problem, x.double().contiguous(), weight.double().contiguous())

        scale = problem.reduction_length**-0.5
        x = [normal(problem.x_spec.shape, 1.0).contiguous(**nhwc) for _ in range(sets)]
        weight = [normal(problem.weight_spec.shape, scale) for _ in range(sets)]
        y = [torch.empty(problem.y_spec.shape, device="cuda", dtype=dtype).contiguous(**nhwc) for _ in range(sets)]
        xi = torch.randint(-2, 3, problem.x_spec.shape, device="cuda").to(dtype).contiguous(**nhwc)
        wi = torch.randint(-1, 2, problem.weight_spec.shape, device="cuda").to(dtype)
        return Data(problem, x, weight, y, (xi, wi, reference(xi, wi)), (x[0], weight[0], reference(x[0], weight[0])))


def conv(problem: Layer, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The problem by torch."""
    if isinstance(problem, LinearProblem):
        return functional.linear(x, weight)
    return functional.conv2d(
        x, weight, None, (problem.stride_h, problem.stride_w), (problem.pad_h, problem.pad_w),
        (problem.dilation_h, problem.dilation_w), problem.groups,
    )  # fmt: skip


def bound(problem: Layer) -> float:
    """Relative L2 error that a result may have."""
    if problem.x_spec.dtype == "fp16":
        return 4e-4
    if problem.x_spec.dtype == "bf16":
        return 3e-3
    return 0.6 * 2**-23 * max(1, problem.reduction_length) ** 0.5 if problem.numerics == "strict" else 6e-4


def check(executable: Executable, data: Data, workspace: torch.Tensor | None) -> tuple[float, str]:
    """Relative error on normal data, and what is wrong."""
    y = data.y[0]
    for exact, (x, weight, expected) in ((True, data.integer), (False, data.normal)):
        y.fill_(float("nan"))
        if workspace is not None:
            workspace.fill_(255)
        executable.launch(Buffers((x,), [y], executable.pack([weight])), workspace)
        if exact and not torch.equal(y, expected.to(y.dtype)):
            return float("nan"), "wrong on integers"
    error = ((y.double() - data.normal[2]).norm() / data.normal[2].norm()).item()
    return error, "" if error <= bound(data.problem) else f"relative error {error:.2g}"


def captured(launch: Callable[[int], Any]) -> torch.cuda.CUDAGraph:
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


def our_graph(executable: Executable, data: Data) -> torch.cuda.CUDAGraph:
    """Our launches over the rotating buffers."""
    sets = len(data.x)
    packed = [executable.pack([weight]) for weight in data.weight]
    size = executable.workspace_bytes
    scratch = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
    graph = captured(
        lambda i: executable.launch(Buffers((data.x[i % sets],), [data.y[i % sets]], packed[i % sets]), scratch)
    )
    graph.kept = (packed, scratch)  # type: ignore[attr-defined]
    return graph


def cudnn_graph(data: Data) -> torch.cuda.CUDAGraph:
    """Torch's launches, cudnn.benchmark having chosen."""
    sets = len(data.x)
    weight = data.weight
    if not isinstance(data.problem, LinearProblem):
        weight = [w.contiguous(memory_format=torch.channels_last) for w in weight]
    graph = captured(lambda i: conv(data.problem, data.x[i % sets], weight[i % sets]))
    graph.kept = weight  # type: ignore[attr-defined]
    return graph


@dataclass
class Outcome:
    """What became of one candidate."""

    candidate: Candidate
    status: str
    us: float = float("nan")
    error: float = float("nan")
    guess: float = float("nan")


def try_all(found: list[Candidate], refused: dict[Candidate, str], data: Data, target: Target) -> Iterator[Outcome]:
    """Check and quickly time each candidate."""
    for candidate in found:
        engine = load_engine(candidate.engine)
        guess = engine.estimate_us(candidate.problem, candidate.knobs, target) or float("nan")
        if refused[candidate]:
            yield Outcome(candidate, refused[candidate], guess=guess)
            continue
        executable = engine.build(candidate.problem, candidate.knobs, target)
        size = executable.workspace_bytes
        error, wrong = check(executable, data, torch.empty(size, dtype=torch.uint8, device="cuda") if size else None)
        if wrong:
            yield Outcome(candidate, wrong, error=error, guess=guess)
            continue
        graph = our_graph(executable, data)
        replay_us(graph, 1)
        yield Outcome(candidate, "ok", statistics.median(replay_us(graph, 4)), error, guess)


def finals(outcomes: list[Outcome], data: Data, target: Target) -> dict[str, list[float]]:
    """The three best of each engine and cuDNN in turn: samples by name, an engine's best config only."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {"torch.graph": cudnn_graph(data)}
    for engine_id in {outcome.candidate.engine for outcome in outcomes}:
        own = sorted((o for o in outcomes if o.candidate.engine == engine_id and o.status == "ok"), key=lambda o: o.us)
        for outcome in own[:2]:
            c = outcome.candidate
            graphs[f"{c.engine}[{c.knobs}]"] = our_graph(load_engine(c.engine).build(c.problem, c.knobs, target), data)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            samples[name] += replay_us(graph, 1)
    return samples


def short(problem: Layer) -> str:
    """A layer's name for people."""
    if isinstance(problem, LinearProblem):
        return f"linear {problem.c}>{problem.k}"
    stride = f"/{problem.stride_h}" if problem.stride_h > 1 else ""
    groups = f" g{problem.groups}" if problem.groups > 1 else ""
    return f"{problem.c}>{problem.k} {problem.r}x{problem.s}{stride}{groups} @{problem.h}"


def record(recorder: Recorder, problem: Layer, samples: dict[str, list[float]]) -> tuple[str, float]:
    """Write torch's figure and each engine's best; return the best engine config and its time."""
    best: dict[str, tuple[float, str]] = {}
    for name, values in samples.items():
        provider = name if name == "torch.graph" else "convoy." + name.partition("[")[0]
        median = statistics.median(values)
        if provider not in best or median < best[provider][0]:
            best[provider] = (median, name)
    for provider, (median, name) in best.items():
        low, high = statistics.quantiles(samples[name], n=5)[0], statistics.quantiles(samples[name], n=5)[3]
        recorder.add(
            subject=problem.key, provider=provider, metric="kernel_us", unit="us", p50=median, p20=low, p80=high,
            batch=problem.n, dtype=problem.x_spec.dtype, numerics=problem.numerics,
            note=f"floor {problem.bytes_min / 3.1e6:.3g} us {name.partition('[')[2].rstrip(']')}".strip(),
        )  # fmt: skip
    ours = [(median, name) for provider, (median, name) in best.items() if provider != "torch.graph"]
    median, name = min(ours) if ours else (float("nan"), "none")
    return name, median


def report(problem: Layer, samples: dict[str, list[float]], name: str, ours: float, outcomes: list[Outcome]) -> float:
    """Print one layer's line; returns how many times faster than torch the best of ours is."""
    torch_us = statistics.median(samples["torch.graph"])
    floor = max(problem.bytes_min / 3.1e6, problem.flops / 8e8)
    wrong = [o for o in outcomes if "wrong" in o.status or "relative" in o.status]
    print(
        f"{short(problem):26s} floor {floor:6.2f} torch {torch_us:7.2f} ours {ours:7.2f} x{torch_us / ours:4.2f} {name}"
        + "".join(f"\n  WRONG {o.candidate.engine}[{o.candidate.knobs}]: {o.status}" for o in wrong[:2]),
        flush=True,
    )
    return torch_us / ours


def keep_candidates(path: Path, outcomes: list[Outcome]) -> None:
    """Write every candidate's time beside the cost model's guess."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("problem", "engine", "knobs", "status", "us", "guess_us", "error"))
        for o in outcomes:
            c = o.candidate
            figures = (f"{o.us:.4g}", f"{o.guess:.4g}", f"{o.error:.3g}")
            writer.writerow((c.problem.key, c.engine, c.knobs, o.status, *figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--engines", nargs="*", default=[e for e in MANIFEST if e.startswith("triton.")])
    parser.add_argument("--keep", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--candidates", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    target = Target("cuda", "GPU", "sm_90", 132, 80 << 30, L2_BYTES)
    every = {run: problems(run) for run in options.runs}
    found = {p: candidates(p, options.engines, target, options.keep) for group in every.values() for p in group}
    refused = compile_all([c for group in found.values() for c in group], target, options.jobs)
    print(
        f"{len(refused)} builds, {sum(map(bool, refused.values()))} refused, {time.monotonic() - started:.0f} s",
        flush=True,
    )
    torch.backends.cudnn.benchmark = True
    versions = f"torch={torch.__version__} cudnn={torch.backends.cudnn.version()} triton={version('triton')}"
    protocol = f"graph of {LAUNCHES}, rotating buffers, median of {ROUNDS} replays"
    device = torch.cuda.get_device_name()
    recorder = Recorder("layers", device=device, versions=versions, protocol=protocol, folder=options.folder)
    outcomes: list[Outcome] = []
    means: list[str] = []
    for run, group in every.items():
        torch.backends.cudnn.allow_tf32 = ":strict:" not in run
        ratios: list[float] = []
        for problem in group:
            if time.monotonic() - started > options.seconds:
                print("out of time before", problem.key)
                break
            data = Data.of(problem)
            own = list(try_all(found[problem], refused, data, target))
            outcomes += own
            samples = finals([o for o in own if o.status == "ok"], data, target)
            name, ours = record(recorder, problem, samples)
            ratios.append(report(problem, samples, name, ours, own))
        good = [ratio for ratio in ratios if ratio > 0]
        if good:
            behind = sum(ratio < 1 for ratio in good)
            means.append(f"{run}: {statistics.geometric_mean(good):.2f} over {len(good)} layers, {behind} behind")
    if options.candidates:
        keep_candidates(options.candidates, outcomes)
    recorder.write()
    print("geometric means over torch inside a graph:", *means, f"{time.monotonic() - started:.0f} s", sep="\n  ")


if __name__ == "__main__":
    main()
