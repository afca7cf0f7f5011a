"""Engines that skip zeros, and convolution + pooling in one kernel, over the share of zeros, beside the best that does not skip.

Usage: python bench/zeroskip/zeroskip.py RUN [RUN ...] [--device cuda] [--batch 1 8 32] [--numerics strict] [--keep 8]
                                         [--seconds 500] [--without PROVIDER ...] [--shares 0 50 95] [--folder DIR]
                                         [--model NAME --weights FILE --input PATH]

A RUN is one of these, by itself or as RUN:DTYPE:BATCH (`pairs:fp16:32`):
  curve     five layers over all shares of zeros (--shares: some of them), put in random places and channel by channel
  deep      the 28x28 and 14x14 layers of that, and no others
  vgg19     VGG-19's sixteen convolutions at the shares that the paper's planes have
  pairs     VGG-19's five convolution + pooling pairs at these shares
  nets      the layers of LeNet, AlexNet, GoogLeNet and ResNet-50 (bench/layers) at 50 and 75 % zeros
  pools     convolution + pooling of AlexNet, GoogLeNet and ResNet-50, without zeros: fused against unfused
  replica   the paper's own workload: one channel, one filter, 32 equal planes; also with its own timed region, copies and all
  real      every convolution of --model on what it really reads for the images of --input

Providers: every engine of ours that skips, the best of our dense engines (`convoy.dense`), cuDNN's best plan (`cudnn.best`),
PyTorch (`torch`), im2col + a sparse product (`sparse`: cuSPARSE on a GPU; the time of putting the columns into CSR form is left
out). For poolings: our dense engines that pool in their kernel (`convoy.fused`), the best cuDNN plan and the best dense engine
followed by PyTorch's pooling (`cudnn.best+pool`, `convoy.dense+pool`), and the latter followed by our own
(`convoy.dense+convoy.pool`). --without leaves providers out, and engines of ours by `convoy.ID`. Engines that do not skip are
chosen once for a problem, whatever its zeros. Every result is checked against float64 before it is timed. Rows go to
bench/results/zeroskip-DEVICE.csv, the share of zeros in the note; for layers timed at several shares also how time falls with
them (`correlation`, `slope_us`) and what inputs without zeros and with 75 % take beside the best dense engine (`dense_cost`,
`share_of_dense`).
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from convoy.engines.activations import finish, pool2d
from convoy.engines.base import Buffers, Executable
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.engines.triton.pooling.pool_pass import ReduceWindows, window_support
from convoy.errors import ConvoyError
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.data import Data, with_zeros
from convoy.measurement.device.detect import detect_target
from convoy.measurement.oracle import oracle
from convoy.problem import ConvProblem, Epilogue, Knobs, Pool
from convoy.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.layers.layer_data import DTYPES
from bench.layers.layer_timing import Builders, device_facts, variants
from bench.layers.make_layers import COLUMNS as SIZES
from bench.shared.record import Recorder
from bench.zeroskip.zeroskip_slopes import VGG19, VGG19_ZEROS, fall

SHARES = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
PAIRS = (1, 3, 7, 11, 15)
"""Indices of the convolutions that a pooling follows."""

DEEP = ((512, 512, 28), (512, 512, 14))
CURVE = ((256, 256, 56), (128, 128, 28), (512, 512, 28), (512, 512, 14), (512, 512, 7))
POOL = Pool("max", 2, 2, 2, 2)
POOLED = (
    ConvProblem(1, 3, 224, 224, 64, 11, 11, 2, 2, 4, 4, epilogue=Epilogue(True, pool=Pool("max", 3, 3, 2, 2))),
    ConvProblem(1, 64, 27, 27, 192, 5, 5, 2, 2, epilogue=Epilogue(True, pool=Pool("max", 3, 3, 2, 2))),
    ConvProblem(1, 64, 56, 56, 192, 3, 3, 1, 1, epilogue=Epilogue(True, pool=Pool("max", 3, 3, 2, 2, ceil_mode=True))),
    ConvProblem(1, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2, epilogue=Epilogue(True, pool=Pool("max", 3, 3, 2, 2, 1, 1))),
    *(
        ConvProblem(1, c, h, h, k, 3, 3, 1, 1, epilogue=Epilogue(True, pool=POOL))
        for c, k, h in map(VGG19.__getitem__, PAIRS)
    ),
)

SLACK = 2.0
"""Times the bound of ordinary data: where few terms are left, results that cancel weigh more."""

ROUNDS = 15
LAUNCHES = 20


@dataclass(frozen=True)
class Case:
    """A problem on one input: its percentage of zeros, how they lie, and the data."""

    problem: ConvProblem
    zeros: float
    kind: str
    data: Data
    exact: tuple[torch.Tensor, ...]

    @staticmethod
    def of(problem: ConvProblem, zeros: float, kind: str, data: Data) -> Case:
        """With its float64 results, by torch."""
        return Case(problem, zeros, kind, data, tuple(oracle(problem, data)))


Known = tuple[ConvProblem, float, str]
"""What a case is known by: its problem, its percentage of zeros, how they lie."""

Plan = tuple[ConvProblem, Callable[[], Case]]
"""A problem, and its case, which is made when its turn comes."""


class Unfused(Executable):
    """A convolution by one engine, then PyTorch's pooling, or our own: what has to be beaten."""

    allocates_results = True

    def __init__(self, executable: Executable, problem: ConvProblem, windows: ReduceWindows | None = None) -> None:
        self.executable, self.problem, self.windows = executable, problem, windows
        self.workspace_bytes = executable.workspace_bytes

    def pack(self, constants: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """As the convolution wants it."""
        return self.executable.pack(constants)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Both."""
        x, shape = buffers.args[0], self.problem.conv_spec.shape
        y = None
        if not self.executable.allocates_results:
            y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        inner = Buffers(buffers.args, [y], buffers.constants)
        self.executable.launch(inner, workspace)
        made = inner.results[0]
        if self.windows is None:
            buffers.results[0] = pool2d(made, self.problem.epilogue.pool)  # type: ignore[arg-type]
            return
        pooled = torch.empty(
            self.problem.y_spec.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last
        )
        self.windows.launch(made, pooled, None, None)  # type: ignore[arg-type]
        buffers.results[0] = pooled


def own_pooling(problem: ConvProblem, target: Target) -> ReduceWindows | None:
    """Our pooling kernel, where there is one for the window."""
    pool, dtype = problem.epilogue.pool, problem.y_dtype
    if target.device != "cuda" or pool is None or not window_support(pool):
        return None
    n, k, p, q = problem.conv_spec.shape
    return ReduceWindows("triton.pooling", (n, k, p, q), 1, (dtype, dtype), Epilogue(pool=pool), target)


class SparseColumns(Executable):
    """im2col in CSR form, made once for each input outside the timed region, times the dense weight: torch's sparse product."""

    allocates_results = True

    def __init__(self, problem: ConvProblem, x: torch.Tensor) -> None:
        self.problem = problem
        sizes = (
            (problem.dilation_h, problem.dilation_w),
            (problem.pad_h, problem.pad_w),
            (problem.stride_h, problem.stride_w),
        )
        columns = torch.nn.functional.unfold(x.contiguous(), (problem.r, problem.s), *sizes)
        self.columns = columns.transpose(1, 2).flatten(0, 1).to_sparse_csr()

    def pack(self, constants: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The weight as [c · r · s, k]."""
        return constants[0].flatten(1).t().contiguous(), *constants[1:]

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """The product and the epilogue."""
        del workspace
        problem = self.problem
        made = (
            (self.columns @ buffers.constants[0]).view(problem.n, problem.p, problem.q, problem.k).permute(0, 3, 1, 2)
        )
        bias = buffers.constants[1] if problem.epilogue.bias else None
        buffers.results[0] = pool2d(finish(made, bias, None, problem.epilogue.activation), problem.epilogue.pool)


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


def case_of(problem: ConvProblem, zeros: float, kind: str, device: str, seed: int = 1) -> Case:
    """Ordinary data with zeros: in random places, or as whole channels, the same of all images."""
    plain = make_data(problem, seed, "normal", device)
    data = with_zeros(plain, 0 if kind == "channels" else zeros, seed + 1)
    x = data.args[0]
    if kind == "channels":
        dead = torch.randperm(problem.c, generator=torch.Generator().manual_seed(seed + 2))[
            : round(problem.c * zeros / 100)
        ]
        x = x.clone(memory_format=torch.preserve_format)
        x[:, dead] = 0
    x = x.contiguous(memory_format=torch.channels_last)
    if kind == "equal planes":
        x = x[:1].expand_as(x).contiguous(memory_format=torch.channels_last)
    return Case.of(problem, zeros, kind, Data((x, *data.args[1:]), data.constants))


def laid(problem: ConvProblem, batch: int, dtype: str, numerics: str) -> ConvProblem:
    words = {"x_dtype": dtype, "weight_dtype": dtype, "y_dtype": dtype, "layout": "nhwc", "numerics": numerics}
    epilogue = replace(problem.epilogue, bias=True, activation="relu")
    return replace(problem, n=batch, epilogue=epilogue, **words)


def plans(run: str, options: argparse.Namespace, batch: int) -> Iterator[Plan]:
    """A run's cases."""
    numerics = options.numerics if options.dtype == "fp32" else "half"

    def at(problem: ConvProblem, zeros: float, kind: str = "random") -> Plan:
        wanted = laid(problem, batch, options.dtype, numerics)
        return wanted, lambda: case_of(wanted, zeros, kind, options.device)

    def square(c: int, k: int, h: int, pool: Pool | None = None) -> ConvProblem:
        return ConvProblem(1, c, h, h, k, 3, 3, 1, 1, epilogue=Epilogue(pool=pool))

    if run in ("curve", "deep"):
        for sizes in CURVE if run == "curve" else DEEP:
            for kind in ("random", "channels"):
                yield from (at(square(*sizes), zeros, kind) for zeros in options.shares)
    elif run == "vgg19":
        yield from (at(square(*sizes), zeros) for sizes, zeros in zip(VGG19, VGG19_ZEROS, strict=True))
    elif run == "pairs":
        yield from (at(square(*VGG19[i], POOL), VGG19_ZEROS[i]) for i in PAIRS)
    elif run == "pools":
        yield from (at(problem, 0) for problem in POOLED)
    elif run == "nets":
        lenet = [ConvProblem(1, 1, 28, 28, 20, 5, 5), ConvProblem(1, 20, 12, 12, 50, 5, 5)]
        for problem in (*lenet, *(p for name in ("alexnet", "googlenet", "resnet50") for p in net_layers(name))):
            yield from (at(problem, zeros) for zeros in (50, 75))
    elif run == "replica":
        for (_, _, h), zeros in zip(VGG19, VGG19_ZEROS, strict=True):
            problem = laid(ConvProblem(32, 1, h, h, 1, 3, 3, 1, 1), 32, options.dtype, numerics)
            yield problem, partial(case_of, problem, zeros, "equal planes", options.device)
    elif run == "real":
        yield from real_cases(options, batch)


def net_layers(name: str) -> Iterator[ConvProblem]:
    """The convolutions of a net of bench/layers without groups."""
    with (Path(__file__).parents[1] / "layers" / f"{name}.csv").open() as file:
        for row in csv.DictReader(file):
            sizes: dict[str, Any] = {size: int(row[size]) for size in SIZES}
            if sizes["groups"] == 1:
                yield ConvProblem(**sizes)


def real_cases(options: argparse.Namespace, batch: int) -> Iterator[Plan]:
    """What a net's convolutions read for real images, with the weights that they meet."""
    from convoy.zoo import load_images, load_model, preprocessing

    model, wanted = load_model(options.model, weights=options.weights), preprocessing(options.model)
    images = load_images(options.input, size=wanted.size, batch=batch, mean=wanted.mean, std=wanted.std)
    for name, plain, x, constants in layer_inputs(model, images):
        problem = laid(plain, batch, options.dtype, options.numerics)
        yield problem, partial(real_case, problem, f"real {options.model} {name}", x, constants, options.device)


def layer_inputs(
    model: torch.nn.Module, images: torch.Tensor
) -> Iterator[tuple[str, ConvProblem, torch.Tensor, Sequence[torch.Tensor]]]:
    """Each convolution of a net: its name and problem, what it reads for some images, its weight and bias."""
    from convoy.capture import capture_inference
    from convoy.engines.interpret import compile_graph
    from convoy.graph.layers import conv_problem
    from convoy.graph.rebuild import rebuild
    from convoy.measurement.count_zeros import convolution_inputs

    captured = capture_inference(model, (images,))
    graph, read = captured.graph, convolution_inputs(captured.graph)
    probe = rebuild(graph.inputs, tuple(read.values()), graph.values, list(graph.nodes))
    maps = compile_graph(probe)([images], [captured.constants[value.name] for value in probe.constants()])
    for (name, _), x in zip(read.items(), maps, strict=True):
        node = graph.node(name)
        problem = conv_problem(graph, node)
        _, weight, *bias = node.refs()
        shift = captured.constants[bias[0]] if bias else torch.zeros(problem.k)
        yield name, problem, x, (captured.constants[weight], shift)


def real_case(problem: ConvProblem, kind: str, x: torch.Tensor, constants: Sequence[torch.Tensor], device: str) -> Case:
    """A case on what a layer reads."""
    dtype = DTYPES[problem.x_dtype]
    x = x.to(device, dtype).contiguous(memory_format=torch.channels_last)
    zeros = round(100 * float((x == 0).double().mean()), 1)
    return Case.of(problem, zeros, kind, Data((x,), tuple(t.to(device, dtype) for t in constants)))


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


def record_falls(figures: Sequence[tuple[Known, dict[str, float]]], recorder: Recorder) -> None:
    """How the time of each engine that skips goes with the share of zeros, on every layer with zeros of one kind."""
    layers: dict[tuple[ConvProblem, str], dict[float, dict[str, float]]] = {}
    for (problem, zeros, kind), found in figures:
        layers.setdefault((problem, kind), {})[zeros] = found
    for (problem, kind), found in layers.items():
        common = {"subject": problem.key, "batch": problem.n, "dtype": problem.x_dtype, "numerics": problem.numerics}
        shares = f"zeros {min(found):g}..{max(found):g} % {kind}"
        for provider in sorted({p for times in found.values() for p in times if p.startswith("convoy.zeroskip.")}):
            line = fall(found, provider)
            if line is None:
                continue
            values = {
                ("correlation", "1"): line.correlation,
                ("slope_us", "us/%"): line.slope_us,
                ("dense_cost", "1"): line.dense_cost,
                ("share_of_dense", "1"): line.at_75,
            }
            for (metric, unit), value in values.items():
                if not math.isnan(value):
                    note = "zeros 75 % " + kind if metric == "share_of_dense" else shares
                    recorder.add(provider=provider, metric=metric, unit=unit, p50=value, note=note, **common)
            print(
                f"{problem.c}>{problem.k} @{problem.h} n{problem.n} {kind} {provider}: correlation {line.correlation:.2f}, "
                f"slope {line.slope_us:.3f} us a percent, no zeros {line.dense_cost:.2f}x dense, 75 % {line.at_75:.2f}x",
                flush=True,
            )


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


def summary(run: str, figures: Sequence[dict[str, float]]) -> str:
    """Means of the quotients that the run is for: each of ours, and the best of those that skip, over each peer."""
    lines = [run]
    for ours in ("convoy.fused", "convoy.dense", "convoy.zeroskip"):
        for peer in (
            "cudnn.best",
            "cudnn.best+pool",
            "convoy.dense",
            "convoy.dense+pool",
            "convoy.dense+convoy.pool",
            "torch",
        ):
            ratios = []
            for found in figures:
                mine = [us for p, us in found.items() if p == ours or p.startswith(f"{ours}.")]
                if mine and peer in found and peer != ours:
                    ratios.append(found[peer] / min(mine))
            if ratios:
                mean, count = statistics.fmean(ratios), len(ratios)
                shown = f"mean {mean:.2f}x, best {max(ratios):.2f}x, least {min(ratios):.2f}x of {count}"
                lines.append(f"  {ours} over {peer}: {shown}")
    return "\n".join(lines)


RUNS = ("curve", "deep", "vgg19", "pairs", "nets", "pools", "replica", "real")


def run_of(text: str) -> tuple[str, str | None, int | None]:
    """RUN[:DTYPE[:BATCH]] → its parts; what is not said is None."""
    name, _, rest = text.partition(":")
    dtype, _, batch = rest.partition(":")
    if name not in RUNS or dtype not in ("", *DTYPES) or not (batch.isdecimal() or not batch):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(RUNS)}, alone or with :DTYPE or :DTYPE:BATCH")
    return name, dtype or None, int(batch) if batch else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=run_of)
    # To ask whether there is CUDA would forbid this process to fork its builders.
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--numerics", default="strict")
    parser.add_argument("--keep", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--without", nargs="*", default=[], metavar="PROVIDER")
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--weights")
    parser.add_argument("--input", nargs="*", default=[])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    every: list[tuple[str, Plan]] = []
    for name, dtype, only in options.runs:
        wanted = argparse.Namespace(**{**vars(options), "dtype": dtype or options.dtype})
        for batch in options.batch if only is None else [only]:
            label = f"{name} {wanted.dtype} batch {batch}"
            every += [(label, plan) for plan in plans(name, wanted, batch)]
    target = device_facts()[0] if options.device == "cuda" else detect_target("cpu")
    building = precompile([plan[0] for _, plan in every], target, options.keep, options.without)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = options.numerics != "strict"
    protocol = f"graph of {LAUNCHES}" if options.device == "cuda" else "wall, 5 ms"
    recorder = Recorder(
        "zeroskip", device=target.name, versions=" ".join(f"{name}={value}" for name, value in target.versions),
        protocol=f"{protocol}, median of {ROUNDS} in turn", folder=options.folder,
    )  # fmt: skip
    done: dict[Known, dict[str, float]] = {}
    with torch.no_grad():
        for run in dict.fromkeys(label for label, _ in every):
            figures: list[tuple[Known, dict[str, float]]] = []
            for problem, make in (plan for name, plan in every if name == run):
                if time.monotonic() - started > options.seconds:
                    print("out of time in", run)
                    break
                for future in building.get(problem, ()):
                    future.result()
                case = make()
                known = (case.problem, case.zeros, case.kind)
                if known not in done:  # nets repeat layers
                    done[known] = measure(case, target, options.keep, recorder, options.without)
                figures.append((known, done[known]))
                if run.startswith("replica"):
                    for provider, won in contest(case, target, options.keep, options.without).items():
                        if won is not None and provider in ("convoy.zeroskip.ecr", "cudnn.best", "torch"):
                            name, executable = won
                            recorder.add(
                                subject=case.problem.key, provider=named(provider, target), metric="region_us", unit="us",
                                p50=region_us(executable, case, options.device), batch=32, numerics=options.numerics,
                                note=f"zeros {case.zeros:g} % {case.kind} {name}",
                            )  # fmt: skip
            print(summary(run, [found for _, found in figures]))
            record_falls(figures, recorder)
    print(recorder.write())


if __name__ == "__main__":
    main()
