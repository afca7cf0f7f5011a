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
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.layers.layer_timing import device_facts
from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.zeroskip.zeroskip_cases import SHARES, Known, Plan, plans, run_of
from bench.zeroskip.zeroskip_contest import LAUNCHES, ROUNDS, contest, measure, named, precompile, region_us
from bench.zeroskip.zeroskip_slopes import fall


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
    run_main(main)
