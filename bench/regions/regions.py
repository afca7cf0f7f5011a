"""How much does an engine for regions of several operators gain? Question `pieces`, metric kernel_us.

Takes every distinct region of a net's training step (with `--inference`: of the net itself) that one of the named engines
supports, and the copy of an nchw input to nhwc. Each is timed with PyTorch's operators, with Inductor and with the engine's first
settings, interleaved on the same data. Sums for each kind of region are printed at the end. The rows keep the question's former
name, `pieces`.

    python bench/regions/regions.py [--nets resnet50,googlenet] [--batch 32] [--dtype bf16] [--engines triton.batch_norm ...]
                           [--device cpu --inference] [--keep 4] [--seconds N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import convoy
from convoy.capture import capture_training
from convoy.engines.base import Engine
from convoy.engines.manifest import entry, load_engine
from convoy.measurement import ChildRunner, Request, detect_target, protocol_for
from convoy.perfdb.row import Measurement
from convoy.pipeline.net import Net, capture_net, make_net
from convoy.problem import LayoutProblem, SubgraphProblem
from convoy.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.training.training_case import Case, loss_of

PEERS = ("aten", "inductor")
ROUNDS = 7


def net_of(case: Case, engines: list[str], *, training: bool) -> Net:
    """A training step, or the net for inference, in nhwc."""
    model, batch = case.model(), case.data()
    settings = convoy.Settings(engines=tuple(map(entry, engines)), layout="nhwc")
    target = detect_target(case.device)
    if not training:
        return capture_net(case.net, model.eval(), batch[:1], {}, settings, target)
    capture = capture_training(model, loss_of, batch, amp=case.amp)
    return make_net(case.net, capture.captured, {}, "nhwc", settings, target)


Region = SubgraphProblem | LayoutProblem


def offered(net: Net) -> Iterator[tuple[str, Region]]:
    """The regions of several operators and the copies of its inputs, each with a name."""
    for region in net.regions:
        named = f"{region.pattern}({'+'.join(region.nodes)})"
        yield from ((named, problem) for problem in region.problems if isinstance(problem, SubgraphProblem))
    graph = net.captured.graph
    for value in graph.inputs:
        if len(graph.values[value].spec.shape) == 4:
            yield f"{value} from nchw to nhwc", LayoutProblem(graph.values[value].spec, "nchw", "nhwc")


def regions(case: Case, engines: list[str], *, training: bool) -> dict[str, tuple[str, Region, int]]:
    """Regions that some engine supports, by key: the name of the first, the region, and how often it occurs."""
    target = detect_target(case.device)
    known = [load_engine(engine) for engine in engines]
    found: dict[str, tuple[str, Region, int]] = {}
    for named, problem in offered(net_of(case, engines, training=training)):
        if any(one.accepts(problem, target) for one in known):
            first, _, count = found.get(problem.key, (named, problem, 0))
            found[problem.key] = (first, problem, count + 1)
    return found


def configs_of(engine: Engine, problem: Region, target: Target, keep: int) -> list[object]:
    """The first settings of an engine; none if it does not support the problem."""
    space = engine.space(problem, target) if engine.accepts(problem, target) else ()
    return [engine.config(knobs) for knobs in space[:keep]]


@dataclass(frozen=True)
class Comparison:
    """The engines that are compared on one machine, and the rows and sums of their times."""

    target: Target
    engines: Sequence[Engine]
    keep: int
    recorder: Recorder
    sums: dict[tuple[str, str], float] = field(default_factory=dict)

    def requests(self, found: Iterable[tuple[str, Region, int]]) -> list[Request]:
        """What the runner measures for each region."""
        return [
            Request(
                problem,
                tuple(c for one in self.engines for c in configs_of(one, problem, self.target, self.keep)),
                ROUNDS,
            )
            for _, problem, _ in found
        ]

    def add(self, subject: str, problem: Region, count: int, rows: Iterable[Measurement], case: Case) -> str:
        """Record the fastest row of each engine; a line for people."""
        best: dict[str, Measurement] = {}
        for row in rows:
            name = row.config.engine
            if row.ok and (name not in best or row.median_us < best[name].median_us):
                best[name] = row
        kind = " ".join(sorted(one.id for one in self.engines[len(PEERS) :] if one.accepts(problem, self.target)))
        line = f"{subject} x{count}:"
        for name, row in best.items():
            took_us = row.median_us
            self.recorder.add(
                subject=subject, batch=case.batch, dtype=case.dtype, provider=f"convoy.{name}",
                metric="kernel_us", unit="us", p50=took_us, p20=took_us - row.spread_us, p80=took_us + row.spread_us,
                ok=True, note=f"times={count} {row.config.knobs}",
            )  # fmt: skip
            line += f"  {name} {took_us:.1f}"
            self.sums[kind, name] = self.sums.get((kind, name), 0.0) + count * took_us
        self.recorder.write()
        return line


def main() -> None:
    """Measure, print a line for each region and the sums, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="resnet50,googlenet")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--engines", nargs="+", default=["triton.batch_norm", "triton.pool_backward"])
    parser.add_argument("--keep", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    end = time.monotonic() + options.seconds
    target, protocol = detect_target(options.device), protocol_for(convoy.Effort.QUICK, options.device)
    versions = " ".join(f"{name}={version}" for name, version in target.versions)
    recorder = Recorder("pieces", device=target.name, versions=versions, protocol=protocol.id, folder=options.folder)
    engines = [load_engine(name) for name in (*PEERS, *options.engines)]
    comparison = Comparison(target, engines, options.keep, recorder)
    runner = ChildRunner(target)
    try:
        for net in options.nets.split(","):
            case = Case(net, options.batch, options.dtype, options.device)
            found = regions(case, options.engines, training=not options.inference)
            requests = comparison.requests(found.values())
            runner.prepare(requests)
            for (named, problem, count), request in zip(found.values(), requests, strict=True):
                if time.monotonic() > end:
                    print(f"out of time in {net}")
                    break
                rows = runner.measure(request, protocol)
                print(comparison.add(f"{net} {named}"[:120], problem, count, rows, case), flush=True)
    finally:
        runner.close()
    for (kind, name), total in sorted(comparison.sums.items()):
        print(f"regions of {kind}: {name} {total / 1e3:.3f} ms in all")
    print(recorder.path)


if __name__ == "__main__":
    run_main(main)
