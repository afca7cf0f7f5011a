"""Single convolutions on this CPU: our kernels in C beside oneDNN and PyTorch. Question `cpu-layers`, metric `kernel_us`.

Every distinct convolution of the nets (bench/layers), fp32 or bf16, channels_last, with bias and ReLU, by each engine's settings,
all in one request, so in turn on the same data, checked against float64. A row is an engine's fastest settings; sums are of each
layer's fastest engine, as often as its net has the layer.

    python bench/layers/cpu_layers.py [--nets resnet50,mobilenet_v2] [--batch 1] [--dtype bf16]
                                       [--engines cpu.direct cpu.depthwise] [--folder DIR]
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import convoy
from convoy.engines.manifest import load_engine
from convoy.measurement import ChildRunner, Request, detect_target, protocol_for
from convoy.perfdb import Measurement
from convoy.problem import ConvProblem, EngineConfig, Epilogue

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.layers.layer_data import FOLDER, problems, short
from bench.shared.command_line import run_main
from bench.shared.record import Recorder

NETS = "alexnet,vgg19,googlenet,resnet50,mobilenet_v2,densenet121,efficientnet_b0"
PEERS = ("aten", "onednn")
ENGINES = ("cpu.direct", "cpu.direct_bf16", "cpu.depthwise", "cpu.grouped", "cpu.winograd")
ROUNDS = 9


def layers(net: str, batch: int, dtype: str) -> Iterator[tuple[ConvProblem, int]]:
    """A net's convolutions, each with how often it occurs."""
    with (FOLDER / f"{net}.csv").open() as file:
        counts = [int(row["count"]) for row in csv.DictReader(file)]
    for problem, count in zip(problems(f"{dtype}:as_torch:{batch}:{net}"), counts, strict=True):
        assert isinstance(problem, ConvProblem)
        yield replace(problem, epilogue=Epilogue(bias=True, activation="relu")), count


def kind_of(problem: ConvProblem) -> str:
    """What people call such a layer."""
    if problem.groups == problem.c > 1:
        return "depthwise"
    if problem.groups > 1:
        return f"groups of {problem.k // problem.groups}"
    if problem.r == problem.s == 1:
        return "1x1"
    if problem.c <= 3:
        return "stem"
    return "3x3" if problem.r == problem.s == 3 and problem.stride_h == problem.stride_w == 1 else "other filters"


def configs_of(problem: ConvProblem, engines: list[str], target: convoy.Target) -> tuple[EngineConfig, ...]:
    """The settings of each engine that takes the problem; of PyTorch and oneDNN the first."""
    known = [load_engine(name) for name in engines]
    return tuple(
        one.config(knobs)
        for one in known
        if one.accepts(problem, target)
        for knobs in one.space(problem, target)[: 1 if one.id in PEERS else None]
    )


def fastest(rows: Iterable[Measurement]) -> dict[str, Measurement]:
    """Each engine's fastest settings."""
    found: dict[str, Measurement] = {}
    for row in rows:
        best = found.get(row.config.engine)
        if best is None or (row.ok, -row.median_us) > (best.ok, -best.median_us):
            found[row.config.engine] = row
    return found


def main() -> None:
    """Measure, print a line a layer and the sums, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    target = detect_target("cpu")
    protocol = protocol_for(convoy.Effort.QUICK, "cpu")
    recorder = Recorder(
        "cpu-layers",
        device=f"{target.name} {target.units} threads",
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        protocol=protocol.id,
        folder=options.folder,
    )
    runner = ChildRunner(target)
    sums: dict[tuple[str, str, str], float] = {}
    try:
        for net in options.nets.split(","):
            for problem, count in layers(net, options.batch, options.dtype):
                configs = configs_of(problem, [*PEERS, *options.engines], target)
                line = f"{net} {short(problem)} x{count}:"
                best = fastest(runner.measure(Request(problem, configs, ROUNDS), protocol))
                for name, row in best.items():
                    recorder.add(
                        subject=f"{net} {problem.key}", batch=options.batch, dtype=options.dtype, provider=f"convoy.{name}",
                        metric="kernel_us", unit="us", p50=row.median_us, p20=row.median_us - row.spread_us,
                        p80=row.median_us + row.spread_us, ok=row.ok,
                        note=f"kind={kind_of(problem).replace(' ', '_')} times={count} flops={problem.flops} {row.config.knobs}",
                    )  # fmt: skip
                    line += f"  {name} {row.median_us:.1f} ({problem.flops / row.median_us / 1e3:.0f} GFLOP/s)"
                for name, engines in (*((peer, [peer]) for peer in PEERS), ("ours", options.engines)):
                    case = net, kind_of(problem), name
                    own = [best[engine].median_us for engine in engines if engine in best and best[engine].ok]
                    took = min(own or [best["aten"].median_us])  # what it does not take, PyTorch runs
                    sums[case] = sums.get(case, 0.0) + count * took / 1e3
                print(line, flush=True)
            recorder.write()
    finally:
        runner.close()
    for (net, kind, name), total in sums.items():
        print(f"{net}, {kind}: {name} {total:.2f} ms")
    print(recorder.path)


if __name__ == "__main__":
    run_main(main)
