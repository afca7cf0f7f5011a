"""How much faster does pruning make a whole net? Question `pruned-net`, metric `latency_ms`.

The net in strict fp32 as Convoy runs it dense, and with most weights of each layer zero: both chosen by Convoy, both outputs
checked against float64, timed in turn in one process. Weights are random, so that zeros lie in random places.

    python bench/pruned/pruned_net.py [--net resnet50] [--batch 1] [--sparsity 0.9] [--pattern unstructured] [--dtype fp32]
                               [--device cpu|cuda] [--settings default|quick] [--without ENGINE ...] [--seconds S] [--db FILE]
                               [--folder DIR]

The engines that read masks, those that wait for a first run on a GPU too, are measured with their default settings alone, or with
`--settings quick` as `convoy optimize` does it: every layer has a mask of its own, and so code of its own to be compiled. From a
database that has the dense net's rows, ResNet-50 takes two minutes on 16 cores. Engines named by `--without` do not compete: one
that compiles code for each mask may take most of the time and win no layer.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from convoy import Settings
from convoy.engines.competition import competing_engines
from convoy.engines.manifest import entry, load_engine
from convoy.measurement import detect_target
from convoy.perfdb import Database
from convoy.pipeline import optimize_model
from convoy.pipeline.check.end_to_end import errors_against, interleave
from convoy.pipeline.check.float64 import exact_outputs
from convoy.pipeline.measure_net import make_runner
from convoy.pipeline.net import capture_net
from convoy.pipeline.optimize import OptimizeResult
from convoy.pipeline.search_pruning import subsumed_problems
from convoy.problem import ConvProblem
from convoy.program import OptimizedModule
from convoy.prune import Recipe, prune_model
from convoy.prune.defaults import measure_defaults
from convoy.settings import Effort
from convoy.target import Target
from convoy.zoo import input_size, load_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.record import Recorder
from bench.shared.time_limit import TimeIsUpError, until

Results = dict[str, OptimizeResult]
"""By `dense` and `pruned`."""

WORSE = 3.0
LEAST_ERROR = {"fp32": 1e-5, "fp16": 1e-2}
"""An output is right within this error, or `WORSE` times that of the stock model against float64 (as in inference.py)."""


def measure_masks(model: nn.Module, x: torch.Tensor, name: str, target: Target, settings: Settings) -> int:
    """Measure engines that read masks on every masked layer, with their defaults; how many problems that were."""
    net = capture_net(name, model, (x,), {}, settings, target)
    shorter = subsumed_problems(net.regions)
    found = {p.key: p for region in net.regions for p in region.problems if isinstance(p, ConvProblem) and p.mask}
    problems = [problem for key, problem in found.items() if key not in shorter]
    engines = [load_engine(engine, settings.engines) for engine in competing_engines(settings)]
    readers = [engine for engine in engines if engine.reads_mask]

    def tell(done: int, total: int, what: str) -> None:
        if done % 10 == 0:
            print(f"  {done} of {total}: {what}", flush=True)

    with Database.open(settings.db) as database, closing(make_runner(target, settings)) as runner:
        of = {"target": target, "settings": settings, "database": database, "runner": runner, "on_progress": tell}
        measure_defaults(problems, readers, **of)
    return len(problems)


def engines_of(result: OptimizeResult) -> Counter[str]:
    """How many convolutions each engine does."""
    return Counter(layer.engine for layer in result.summary.layers if layer.problem.startswith("conv:"))


def runs_of(program: OptimizedModule, x: torch.Tensor) -> Callable[[], object]:
    """A call that runs a program once: on a GPU the replay of its graph."""
    program(x)
    if not x.is_cuda:
        return lambda: program(x)
    found = program.programs[0].runnable
    assert found is not None
    return found.replay  # type: ignore[attr-defined]


def choose(models: dict[str, nn.Module], x: torch.Tensor, options: argparse.Namespace, target: Target) -> Results:
    """Both plans; raises TimeIsUpError."""
    numerics = "strict" if options.dtype == "fp32" else "half"
    extra = (entry("pruned.csr"),) if options.device == "cuda" else ()
    settings = Settings(
        numerics=numerics, db=options.db, timeout_s=120.0, engines=extra, deny_engines=tuple(options.without)
    )
    results: Results = {}
    for name, model in models.items():
        began, effort = time.perf_counter(), Effort.QUICK
        if name == "pruned" and options.settings == "default":
            count = measure_masks(model, x, options.net, target, settings)
            print(f"{count} masked problems measured in {time.perf_counter() - began:.0f} s", flush=True)
            effort = Effort.NONE  # what is in the database is enough
        results[name] = optimize_model(model, (x,), name=options.net, settings=replace(settings, effort=effort))
        used = ", ".join(f"{engine} {count}" for engine, count in engines_of(results[name]).most_common())
        print(f"{name}: {time.perf_counter() - began:.0f} s; {used}", flush=True)
    return results


def main() -> None:
    """Choose, check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--pattern", default="unstructured")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "fp16"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--settings", default="default", choices=("default", "quick"))
    parser.add_argument("--without", nargs="+", default=[], metavar="ENGINE")
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--db", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    target = detect_target(options.device)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[options.dtype]
    size = input_size(options.net)
    shape = (options.batch, 3, *((size, size) if isinstance(size, int) else size[-2:]))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(options.batch)).to(options.device)
    models = {"dense": load_model(options.net).eval().to(options.device)}
    models["pruned"] = copy.deepcopy(models["dense"])
    prune_model(models["pruned"], Recipe.of(options.pattern, options.sparsity), (x,))
    exact = {name: exact_outputs(model, (x,), {}, 0) for name, model in models.items()}
    models, x = {name: model.to(dtype) for name, model in models.items()}, x.to(dtype)
    stock = {name: errors_against(model(x), exact[name]).rel_l2_error for name, model in models.items()}
    with until(options.seconds):
        try:
            results = choose(models, x, options, target)
        except TimeIsUpError:
            parser.exit(1, "time is up before both plans were made; run it again with the same --db\n")
    programs = {name: result.program for name, result in results.items()}
    runs = {name: runs_of(program, x) for name, program in programs.items()}
    timed = interleave(runs, cuda=options.device == "cuda")
    recorder = Recorder(
        "pruned-net", device=target.name, versions=" ".join(f"{name}={value}" for name, value in target.versions),
        protocol=f"interleaved, median, p20 and p80 as median -+ spread, {target.units} units", folder=options.folder,
    )  # fmt: skip
    for name, figures in timed.items():
        error = errors_against(programs[name](x), exact[name]).rel_l2_error
        right = error < max(LEAST_ERROR[options.dtype], WORSE * stock[name])
        used = " ".join(f"{engine}={count}" for engine, count in engines_of(results[name]).most_common())
        recorder.add(
            subject=options.net if name == "dense" else f"{options.net} {options.pattern} {options.sparsity:g}",
            provider="convoy", metric="latency_ms", unit="ms", p50=figures.median_ms,
            p20=max(0.0, figures.median_ms - figures.spread_ms), p80=figures.median_ms + figures.spread_ms,
            batch=options.batch, dtype=options.dtype, numerics="strict" if options.dtype == "fp32" else "half", ok=right,
            note=f"rel_l2_to_float64={error:.1e} {used}",
        )  # fmt: skip
        print(f"{name}: {figures.median_ms:.4f} ms +- {figures.spread_ms:.4f}, error {error:.1e}", flush=True)
    print(f"pruned is {timed['dense'].median_ms / timed['pruned'].median_ms:.2f} times as fast as dense")
    print(recorder.write())


if __name__ == "__main__":
    with torch.no_grad():
        main()
