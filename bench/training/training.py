"""How much faster is a whole training step? Question `training`, metrics step_ms, images_per_s, peak_memory_bytes.

Convoy's step (forward pass, loss, backward pass, update) beside PyTorch's: eager in channels_last with cudnn.benchmark and a
fused optimizer, the same captured as a CUDA graph on one stream, and torch.compile. Same weights and batch; each makes the same
first steps before the timing, whose losses are held to those of strict fp32.

With `--ablation`, what each step gave: `torch.eager`, `torch.graph`, then Convoy's plan with its algorithms on one stream
(`convoy.serial`), over streams (`convoy.streams`), with admission (`convoy.admission`), with merged convolutions
(`convoy.late_update`), and with updates that begin during the backward pass where they are many (`convoy`).

    python bench/training/training.py [--nets resnet50,googlenet] [--batch 32,128] [--dtype bf16,fp32]
                             [--peers graph,inductor,default,max-autotune] [--ablation] [--missing]
                             [--db FILE] [--tune-seconds N] [--seconds N] [--folder DIR]

A mode of torch.compile may compile for five minutes; one that takes longer is a row that says so.
Where tuning reaches `--tune-seconds`, the rest is predicted from what was measured, and the row says so; the next call with the
same `--db` goes on. With `--seconds` no case is begun that could not end in time, and peers for which no time is left are left
out, and said so; `--missing` takes those cases alone that the results lack.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from convoy.engines.triton.merged import ENGINE as MERGED
from convoy.measurement import detect_target
from convoy.pipeline.check.end_to_end import Latency, interleave
from convoy.plan import Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import counts, run_main
from bench.shared.record import Recorder
from bench.shared.time_limit import COMPILE_S, within
from bench.training.convoy_steps import LEAST_S, Run, replayed, stages, tuned
from bench.training.training_case import (
    CHECKED,
    FAR,
    NUDGES,
    WARMUP,
    Case,
    Step,
    eager,
    exact_losses,
    first_losses,
    graph,
    is_right,
    offsets,
)

NETS = "alexnet,googlenet,inception_v3,resnet50,densenet121,mobilenet_v2"

ROUND_S = 0.1
"""Seconds of a round: a training loop gives its steps to the device ahead, and waits for it once in many."""

MODES = {"default": "inductor.default", "reduce-overhead": "inductor.reduce-overhead"}

MODES |= {"max-autotune": "inductor.max-autotune"}


@dataclass(slots=True)
class Table:
    """What is timed of one case.

    Attributes:
        exact: the losses of strict fp32.
        nudged: the same from weights and images one rounding off.
        steps: by provider.
        losses: of the first steps.
        peaks: most bytes that a provider held while it trained.
        notes: by provider, also of those that could not be made.
    """

    case: Case
    exact: list[float]
    nudged: list[list[float]]
    steps: dict[str, Step] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], Step]) -> None:
        """Make a provider's step and take its first losses; one that fails is a row with its reason."""
        cuda = self.case.device == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        try:
            step = make()
            if cuda and name != "torch.graph":  # which made its first steps already
                torch.cuda.reset_peak_memory_stats()
            with within(COMPILE_S) if name in MODES.values() else nullcontext():
                self.losses[name] = first_losses(step, CHECKED + (WARMUP if name == "torch.eager" else 0))
        except Exception as error:
            self.notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        else:
            self.steps[name] = step
            self.peaks[name] = torch.cuda.max_memory_allocated() - before if cuda else 0
        if name not in self.steps:
            print(f"    {name}: {self.notes[name]}", flush=True)


def compare(case: Case, run: Run, recorder: Recorder) -> str:
    """Check and time one case; records every figure and returns a line for people."""
    cuda = case.device == "cuda"
    table = Table(case, exact_losses(case), [exact_losses(case, 1 + seed) for seed in range(NUDGES)])
    table.add("torch.eager", lambda: eager(case))
    if "torch.eager" not in table.steps:
        raise SystemExit(f"{case.net}: PyTorch's own step fails: {table.notes['torch.eager']}")
    if "graph" in run.peers and cuda:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        table.add("torch.graph", lambda: graph(case))
    plan = add_ours(table, run)
    for name, mode in peers_of(run, cuda=cuda).items():
        if run.left_s < LEAST_S:
            print(f"    {name}: left out, no time is left", flush=True)
        else:
            table.add(name, lambda mode=mode: eager(case, mode))
    if run.ablation and cuda and plan is not None and not plan.baseline:
        add_stages(table, run, plan)
    timed = interleave(dict(table.steps), cuda=cuda, least_s=ROUND_S)
    return record(table, timed, recorder)


def add_ours(table: Table, run: Run, name: str = "convoy", **changes: Any) -> Plan | None:
    """Convoy's step under a provider's name; its plan, where there is one."""
    made: list[Plan] = []

    def whole() -> Step:
        step, plan, note = tuned(table.case, run, **changes)
        made.append(plan)
        table.notes[name] = note
        return step

    table.add(name, whole)
    return made[0] if made else None


def add_stages(table: Table, run: Run, plan: Plan) -> None:
    """What each part of Convoy gives: with one update at the end, without merged convolutions, admission, streams."""
    first = plan
    if any(step.pattern == "merge" for step in plan.steps):
        plan = add_ours(table, run, "convoy.admission", deny_engines=(MERGED.id,)) or plan
    for name, stage in {**stages(plan), "convoy.late_update": first}.items():
        if run.left_s > LEAST_S / 2 and not stage.baseline:
            table.add(name, lambda stage=stage: replayed(table.case, run, stage))


def peers_of(run: Run, *, cuda: bool) -> dict[str, str]:
    """Providers of torch.compile with their modes, the slowest to compile last; `inductor` is the one that suits the device."""
    suiting = "reduce-overhead" if cuda else "default"
    return {
        name: mode for mode, name in MODES.items() if mode in run.peers or (mode == suiting and "inductor" in run.peers)
    }


def record(table: Table, timed: dict[str, Latency], recorder: Recorder) -> str:
    """Rows of all providers, and a line for people."""
    case = table.case
    exact, least = table.exact, FAR[case.dtype]
    rounded = [table.losses["torch.eager"], *table.nudged]
    moved = max((max(offsets(run, exact)) for run in table.nudged), default=0.0)
    line = f"{case.net:14} b{case.batch:<4} {case.dtype} "
    for name in dict.fromkeys((*table.steps, *table.notes)):
        figures = timed.get(name)
        losses, ahead = table.losses.get(name, []), WARMUP if name == "torch.graph" else 0
        off = max(offsets(losses, exact[ahead:]), default=math.nan)
        middle, spread = (figures.median_ms, figures.spread_ms) if figures else (math.nan, 0.0)
        rounding = f"rounding_off={moved:.1e}" if name == "torch.eager" else ""
        note = " ".join(filter(None, (f"loss_off={off:.1e}", rounding, table.notes.get(name, ""))))
        common = {"subject": case.net, "batch": case.batch, "dtype": case.dtype, "provider": name, "note": note}
        common["ok"] = figures is not None and is_right(losses, rounded, exact, least, ahead)
        recorder.add(metric="step_ms", unit="ms", p50=middle, p20=middle - spread, p80=middle + spread, **common)
        if figures:
            rates = [1e3 * case.batch / ms for ms in (middle, middle + spread, middle - spread)]
            recorder.add(metric="images_per_s", unit="1/s", p50=rates[0], p20=rates[1], p80=rates[2], **common)
            if table.peaks.get(name):
                recorder.add(metric="peak_memory_bytes", unit="B", p50=float(table.peaks[name]), **common)
            line += f"  {name} {middle:.2f}" + ("" if common["ok"] else " (WRONG)")
    others = [f.median_ms for name, f in timed.items() if not name.startswith("convoy")]
    if "convoy" in timed:
        line += f"  gain {min(others) / timed['convoy'].median_ms:.2f}"
        if "torch.graph" in timed:
            line += f"  over the graph {timed['torch.graph'].median_ms / timed['convoy'].median_ms:.2f}"
    return line


def there(recorder: Recorder, run: Run, *, cuda: bool) -> set[tuple[str, int, str]]:
    """Cases of which the results have Convoy's step and all peers that are wanted."""
    found: dict[tuple[str, int, str], set[str]] = {}
    for row in recorder.earlier():
        if row["metric"] == "step_ms" and row["ok"] == "true":
            found.setdefault((row["subject"], int(row["batch"]), row["dtype"]), set()).add(row["provider"])
    wanted = {"convoy", *peers_of(run, cuda=cuda), *(["torch.graph"] if cuda and "graph" in run.peers else [])}
    return {case for case, names in found.items() if wanted <= names}


def main() -> None:
    """Run the comparison, print a short table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--batch", type=counts, default="32,128")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--peers", default="graph,inductor")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--db", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--tune-seconds", type=float, default=math.inf)
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    run = Run(
        tuple(options.peers.split(",")),
        options.effort,
        options.db,
        time.monotonic() + options.seconds,
        options.ablation,
        options.streams,
        options.tune_seconds,
    )
    warnings.simplefilter("ignore")
    target = detect_target(options.device)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    recorder = Recorder(
        "training",
        device=target.name,
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        protocol="interleaved rounds=15 of 0.1 s, whole steps with update, median, p20 and p80 as median -+ spread",
        folder=options.folder,
    )
    done = there(recorder, run, cuda=options.device == "cuda") if options.missing else set[tuple[str, int, str]]()
    lines: list[str] = []
    left_out: list[str] = []
    for net in options.nets.split(","):
        for batch in options.batch:
            for dtype in options.dtype.split(","):
                case = Case(net, batch, dtype, options.device)
                if (case.net, case.batch, case.dtype) in done:
                    continue
                if run.left_s < 2 * LEAST_S:
                    left_out.append(f"{net} b{batch} {dtype}")
                    continue
                lines.append(compare(case, run, recorder))
                print(lines[-1], flush=True)
                recorder.write()
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    print("\nmilliseconds a step, medians")
    print("\n".join(lines))
    if left_out:
        print("no time was left for " + ", ".join(left_out))
    print(recorder.path)


if __name__ == "__main__":
    run_main(main)
