"""What does an engine for pieces of the graph gain? Question `pieces`, metric kernel_us; what a net's pieces take.

Every distinct piece of a net's training step, or with `--inference` of the net itself, that one of the engines named can do, and
the copy of an nchw input to nhwc, by PyTorch's operators, by Inductor and by the engine at its first settings, all in one
request, so in turn on the same data.
Pieces of one kind are added up at the end.

    python bench/regions/regions.py [--nets resnet50,googlenet] [--batch 32] [--dtype bf16] [--engines triton.batch_norm ...]
                           [--device cpu --inference] [--keep 4] [--seconds N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import convoy
from convoy.capture import capture_training
from convoy.engines.base import Engine
from convoy.engines.manifest import entry, load_engine
from convoy.measurement import ChildRunner, Request, detect_target, protocol_for
from convoy.perfdb.row import Measurement
from convoy.pipeline.net import Net, capture_net, make_net
from convoy.problem import LayoutProblem, SubgraphProblem

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.record import Recorder
from bench.training.training import Case, loss_of

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


Piece = SubgraphProblem | LayoutProblem


def offered(net: Net) -> Iterator[tuple[str, Piece]]:
    """Its pieces and the copies of its inputs, with what to call them."""
    for region in net.regions:
        named = f"{region.pattern}({'+'.join(region.nodes)})"
        yield from ((named, problem) for problem in region.problems if isinstance(problem, SubgraphProblem))
    graph = net.captured.graph
    for value in graph.inputs:
        if len(graph.values[value].spec.shape) == 4:
            yield f"{value} from nchw to nhwc", LayoutProblem(graph.values[value].spec, "nchw", "nhwc")


def pieces(case: Case, engines: list[str], *, training: bool) -> dict[str, tuple[str, Piece, int]]:
    """By key: what the first piece that some engine can do is called, the piece, and how often it occurs."""
    target = detect_target(case.device)
    known = [load_engine(engine) for engine in engines]
    found: dict[str, tuple[str, Piece, int]] = {}
    for named, problem in offered(net_of(case, engines, training=training)):
        if any(one.accepts(problem, target) for one in known):
            first, _, count = found.get(problem.key, (named, problem, 0))
            found[problem.key] = (first, problem, count + 1)
    return found


def configs_of(engine: Engine, problem: Piece, target: convoy.Target, keep: int) -> list[object]:
    """An engine's first settings; none where it says no."""
    space = engine.space(problem, target) if engine.accepts(problem, target) else ()
    return [engine.config(knobs) for knobs in space[:keep]]


def main() -> None:
    """Measure, print a line a piece and the sums, write the CSV."""
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
    target = detect_target(options.device)
    protocol = protocol_for(convoy.Effort.QUICK, options.device)
    recorder = Recorder(
        "pieces",
        device=target.name,
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        protocol=protocol.id,
        folder=options.folder,
    )
    runner = ChildRunner(target)
    engines = [load_engine(name) for name in (*PEERS, *options.engines)]
    sums: dict[tuple[str, str], float] = {}
    try:
        for net in options.nets.split(","):
            case = Case(net, options.batch, options.dtype, options.device)
            found = pieces(case, options.engines, training=not options.inference)
            requests = [
                Request(
                    problem, tuple(c for one in engines for c in configs_of(one, problem, target, options.keep)), ROUNDS
                )
                for _, problem, _ in found.values()
            ]
            runner.prepare(requests)
            for (named, problem, count), request in zip(found.values(), requests, strict=True):
                if time.monotonic() > end:
                    print(f"out of time in {net}")
                    break
                best: dict[str, Measurement] = {}
                for row in runner.measure(request, protocol):
                    name = row.config.engine
                    if row.ok and (name not in best or row.median_us < best[name].median_us):
                        best[name] = row
                subject = f"{net} {named}"[:120]
                line = f"{subject} x{count}:"
                for name, row in best.items():
                    took_us = row.median_us
                    recorder.add(
                        subject=subject, batch=options.batch, dtype=options.dtype, provider=f"convoy.{name}",
                        metric="kernel_us", unit="us", p50=took_us, p20=took_us - row.spread_us, p80=took_us + row.spread_us,
                        ok=True, note=f"times={count} {row.config.knobs}",
                    )  # fmt: skip
                    line += f"  {name} {took_us:.1f}"
                    kind = " ".join(sorted(engine.id for engine in engines[2:] if engine.accepts(problem, target)))
                    sums[kind, name] = sums.get((kind, name), 0.0) + count * took_us
                print(line, flush=True)
                recorder.write()
    finally:
        runner.close()
    for (kind, name), total in sorted(sums.items()):
        print(f"pieces of {kind}: {name} {total / 1e3:.3f} ms in all")
    print(recorder.path)


if __name__ == "__main__":
    main()
