"""Every provider on one case: the engines that skip zeros, dense engines, cuDNN and PyTorch, each checked and timed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from bench.layers.layer_timing import Builders, variants
from bench.shared.record import Recorder
from bench.zeroskip.zeroskip_cases import Case
from bench.zeroskip.zeroskip_peers import SparseColumns, Unfused, own_pooling

from convoy.engines.base import Buffers, Executable
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import ConvoyError
from convoy.measurement.accuracy import judge
from convoy.problem import ConvProblem, Knobs
from convoy.target import Target

SLACK = 2.0
"""Times the bound of ordinary data: where few terms are left, results that cancel weigh more."""

ROUNDS = 15

LAUNCHES = 20


class Timed:
    """An executable with its buffers; on a GPU inside a graph of LAUNCHES."""

    def __init__(self, executable: Executable, case: Case, device: str) -> None:
        self.device, data = device, case.data
        size = executable.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        y = None
        if not executable.allocates_results:
            dtype = data.args[0].dtype
            y = torch.empty(case.problem.y_spec.shape, dtype=dtype, device=device, memory_format=torch.channels_last)
        copies = 1 if device == "cpu" else min(8, 1 + (100 << 20) // max(1, case.problem.weight_spec.size_bytes))
        packs = [executable.pack(data.constants) for _ in range(copies)]
        turn = iter(range(1 << 62))

        def launch() -> None:
            executable.launch(Buffers(data.args, [y], packs[next(turn) % copies]), workspace)

        self._launch = launch
        launch()
        self._graph = _captured(launch) if device == "cuda" else None

    def us(self) -> float:
        """Microseconds a launch."""
        if self._graph is None:
            repeats, begin = 1, time.perf_counter()
            self._launch()
            while time.perf_counter() - begin < 5e-3:
                self._launch()
                repeats += 1
            return (time.perf_counter() - begin) * 1e6 / repeats
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / LAUNCHES


def _captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(LAUNCHES):
                launch()
    return graph


def engines(*, skipping: bool) -> list[str]:
    """Ids of the engines that skip zeros, or of the others but the peers and the oracle."""
    others = ("aten", "reference", "inductor", "cudnn")
    found = [engine for engine in MANIFEST if engine not in others and not engine.startswith("pruned")]
    return [engine for engine in found if load_engine(engine).skips_zeros == skipping]


def candidates(case: Case, target: Target, ids: Sequence[str], keep: int) -> Iterator[tuple[str, Knobs, Executable]]:
    """Built configs of some engines, the likely best of each."""
    for engine_id in ids:
        engine = load_engine(engine_id)
        if engine.supports(case.problem, target):
            for knobs in list(engine.space(case.problem, target))[:keep]:
                try:
                    yield engine_id, knobs, engine.build(case.problem, knobs, target)
                except ConvoyError as error:
                    print(f"  {engine_id}[{knobs}]: {str(error).splitlines()[0]}")


def best(case: Case, target: Target, built: Iterator[tuple[str, Knobs, Executable]]) -> tuple[str, Executable] | None:
    """The fastest that is right: its name with its knobs, and the executable."""
    found: list[tuple[float, str, Executable]] = []
    for engine_id, knobs, executable in built:
        timed = right_and_timed(f"{engine_id}[{knobs}]", executable, case, target)
        if timed is not None:
            found.append((min(timed.us() for _ in range(3)), f"{engine_id}[{knobs}]", executable))
    return min(found, key=lambda item: item[0])[1:] if found else None


def right_and_timed(name: str, executable: Executable, case: Case, target: Target) -> Timed | None:
    """Held to float64 on this very input; None, with a line, where it is wrong or cannot be run."""
    family = "library" if executable.allocates_results else "implicit_gemm"
    try:
        tf32 = target.device == "cuda" and case.problem.numerics == "as_torch"
        family = "winograd" if "winograd" in name else "fft" if "fft" in name else family
        verdict = judge(executable, family, case.problem, case.data, "normal", exact=case.exact, tf32=tf32)
        if not verdict.error <= SLACK * verdict.bound:
            print(f"  WRONG {name}: {verdict.reason}")
            return None
        return Timed(executable, case, target.device)
    except (ConvoyError, RuntimeError) as error:
        print(f"  {name}: {str(error).splitlines()[0]}")
        return None


_CHOSEN: dict[tuple[ConvProblem, str], tuple[str, Executable] | None] = {}
"""What won for a problem among engines whose time does not depend on zeros."""


def chosen(case: Case, target: Target, provider: str, ids: Sequence[str], keep: int) -> tuple[str, Executable] | None:
    """The best of some engines that do not skip zeros."""
    if (case.problem, provider) not in _CHOSEN:
        _CHOSEN[case.problem, provider] = best(case, target, candidates(case, target, ids, keep))
    return _CHOSEN[case.problem, provider]


def contest(
    case: Case, target: Target, keep: int, without: Sequence[str] = ()
) -> dict[str, tuple[str, Executable] | None]:
    """Provider → name and executable of what it would run here; None where it has nothing."""
    problem, found = case.problem, {}
    for engine_id in engines(skipping=True):
        if f"convoy.{engine_id}" not in without:
            found[f"convoy.{engine_id}"] = best(case, target, candidates(case, target, [engine_id], keep))
    pooled = problem.epilogue.pool is not None
    dense = [engine for engine in engines(skipping=False) if f"convoy.{engine}" not in without]
    fused = "convoy.fused" if pooled else "convoy.dense"
    for provider, ids, tried in ((fused, dense, keep), ("cudnn.best", ["cudnn"], 64), ("torch", ["aten"], 1)):
        if provider not in without:
            found[provider] = chosen(case, target, provider, ids, tried)
    if pooled:
        plain = replace(problem, epilogue=replace(problem.epilogue, pool=None))
        inner = Case.of(plain, case.zeros, case.kind, case.data)
        windows = own_pooling(problem, target)
        for provider, ids in (("convoy.dense", dense), ("cudnn.best", ["cudnn"])):
            if (won := chosen(inner, target, provider, ids, keep)) is not None:
                found[f"{provider}+pool"] = (won[0], Unfused(won[1], problem))
                if windows is not None and provider == "convoy.dense":
                    found["convoy.dense+convoy.pool"] = (won[0], Unfused(won[1], problem, windows))
    if problem.groups == 1 and problem.x_dtype == "fp32" and "sparse" not in without:
        found["sparse"] = ("torch sparse CSR", SparseColumns(problem, case.data.args[0]))
    return found


def named(provider: str, target: Target) -> str:
    """A provider's name in files, where peers have one name each."""
    cuda = target.device == "cuda"
    return {"torch": "torch.graph" if cuda else "torch.eager", "sparse": "cusparse" if cuda else "mkl.sparse"}.get(
        provider, provider
    )


def measure(case: Case, target: Target, keep: int, recorder: Recorder, without: Sequence[str] = ()) -> dict[str, float]:
    """All providers in turn; rows and a printed line."""
    found = {p: won for p, won in contest(case, target, keep, without).items() if won is not None}
    timed = {p: (name, right_and_timed(name, e, case, target)) for p, (name, e) in found.items()}
    ready = {p: (name, t) for p, (name, t) in timed.items() if t is not None}
    samples: dict[str, list[float]] = {provider: [] for provider in ready}
    for _ in range(ROUNDS):
        for provider, (_, t) in ready.items():
            samples[provider].append(t.us())
    for provider, values in samples.items():
        fifths = statistics.quantiles(values, n=5)
        recorder.add(
            subject=case.problem.key, provider=named(provider, target), metric="kernel_us", unit="us",
            p50=statistics.median(values), p20=fifths[0], p80=fifths[3],
            batch=case.problem.n, dtype=case.problem.x_dtype, numerics=case.problem.numerics,
            note=f"zeros {case.zeros:g} % {case.kind} {ready[provider][0]}",
        )  # fmt: skip
    medians = {provider: statistics.median(values) for provider, values in samples.items()}
    shown = "  ".join(f"{provider} {us:.1f}" for provider, us in sorted(medians.items(), key=lambda item: item[1]))
    p = case.problem
    print(f"{p.c}>{p.k} {p.r}x{p.s} @{p.h} n{p.n} {p.epilogue} {case.zeros:g} % {case.kind}: {shown}", flush=True)
    return medians


def region_us(executable: Executable, case: Case, device: str) -> float:
    """The paper's timed region: allocation, copies to the device and back, and the launch; host's clock, median."""
    x, constants = case.data.args[0].cpu(), [t.cpu() for t in case.data.constants]
    samples = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        placed = tuple(t.to(device) for t in constants)
        size = executable.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        y = None
        if not executable.allocates_results:
            y = torch.empty(case.problem.y_spec.shape, dtype=x.dtype, device=device, memory_format=torch.channels_last)
        buffers = Buffers((x.to(device),), [y], executable.pack(placed))
        executable.launch(buffers, workspace)
        assert buffers.results[0] is not None
        buffers.results[0].cpu()
        samples.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(samples)


def precompile(
    problems: Sequence[ConvProblem], target: Target, keep: int, without: Sequence[str]
) -> dict[ConvProblem, list[Future[str]]]:
    """On a GPU, build everything of ours in child processes, made before this process touches CUDA; by problem."""
    if target.device != "cuda":
        return {}
    builders = Builders(os.cpu_count() or 1)
    every = (*engines(skipping=True), *engines(skipping=False))
    ids = [engine for engine in every if not engine.startswith("cudnn") and f"convoy.{engine}" not in without]
    found: dict[ConvProblem, list[Future[str]]] = {}
    for problem in dict.fromkeys(problems):
        plain = replace(problem, epilogue=replace(problem.epilogue, pool=None))
        wanted = [v for p in dict.fromkeys((problem, plain)) for v in variants(p, ids, target, keep)]
        found[problem] = list(builders.submit(wanted, target).values())
    return found
