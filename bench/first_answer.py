"""How long until a net's first answer, and does `time_s` hold? Question `first-answer`, each figure in a fresh process.

- `first_s`: seconds of `convoy.optimize` at effort `none` and the first call, with torch imported; importing convoy counts. The
  database and the caches of all compilers (Triton's, Inductor's, Convoy's own) are empty; Python's bytecode is there, Convoy's
  and that of the installed packages, as after `pip install`.
- `again_s`: the same with an empty database and the caches that the first process left: nothing is compiled twice.
- `stored_s`: the same with the first process's database too: the call starts from the plan that was found there (a busy machine's
  verdict that nothing is faster than PyTorch is not stored: the notes say how often a plan was there).
- `first_cpu_s`, ...: the processor time of the same, of the process and its children: what a busy machine disturbs less.
- `overrun_10s`, ...: wall time of `convoy.optimize` with `time_s=10` as a multiple of it; `training_overrun_10s` of
  `convoy.training_step`. Compilers' caches are empty.

    python bench/first_answer.py [--nets resnet18,mobilenet_v2,resnet50] [--batch 1] [--dtype fp32] [--device cpu] [--times 10,30]
                                 [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, which holds the package `bench`

from bench.shared.bytecode import compile_installed_packages, compile_package
from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.shared.rows import Row
from bench.tuning.versions import CACHES

import convoy
from convoy.compare.runs.manifest import host
from convoy.target import usable_cores

WORDS = {
    "first_s": "first answer, s", "again_s": "compiled before, s", "stored_s": "from the stored plan, s",
    "first_cpu_s": "processor time, s", "again_cpu_s": "processor time, compiled before, s",
    "stored_cpu_s": "processor time, stored plan, s",
}  # fmt: skip
"""Heads of the columns of the table."""

STARTS = ("first", "again", "stored")
"""What a process finds: nothing; the compilers' caches of the one before; its database too."""

CHILD = """
import json, os, sys, time
import torch
from convoy.zoo import example_args, load_model
name, batch, dtype, device, time_s, training = json.loads(sys.argv[1])
kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
model = load_model(name).to(device, kind)
args = tuple(x.to(device, kind) for x in example_args(model, batch=batch))
for module in [each for each in sys.modules if each.partition(".")[0] == "convoy"]:
    del sys.modules[module]  # importing convoy is part of what is timed; the model's own library is not
def cpu():
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
start, before = time.perf_counter(), cpu()
import convoy
settings = convoy.Settings(effort="quick", time_s=time_s) if time_s else convoy.Settings(effort="none")
if training:
    model.train()
    labels = torch.zeros(batch, dtype=torch.long, device=device)
    loss = torch.nn.functional.cross_entropy
    fast = convoy.training_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), (*args, labels), settings=settings)
    took = time.perf_counter() - start
    fast(*args, labels)
else:
    fast = convoy.optimize(model, args, settings=settings)
    took = time.perf_counter() - start
    fast(*args)
if device == "cuda":
    torch.cuda.synchronize()
whole = time.perf_counter() - start
from convoy.measurement import detect_target
from convoy.pipeline.stored_plans.plan_store import FROM_DATABASE
target = detect_target(device)
plan = fast.plan
print(json.dumps({
    "call_s": took, "first_s": whole, "cpu_s": cpu() - before, "baseline": plan.baseline,
    "stored": any(note.startswith(FROM_DATABASE) for note in plan.notes), "device": target.name,
    "versions": " ".join(f"{key}={value}" for key, value in target.versions if key in ("torch", "cuda", "cudnn")),
}))
"""
"""Runs in a fresh process; prints one line of JSON."""


def measured(
    net: str,
    batch: int,
    dtype: str,
    device: str,
    folder: Path,
    *,
    time_s: float = 0.0,
    training: bool = False,
    database: str = "perf",
) -> dict[str, Any]:
    """One fresh process.

    Args:
        net: a name that `convoy.zoo.load_model` takes.
        batch: images.
        dtype: of the net.
        device: `cpu` or `cuda`.
        folder: holds the compilers' caches and the databases.
        time_s: `Settings.time_s`; 0: a first answer, at effort `none`.
        training: tune a training step, not inference.
        database: name of the database in the folder.

    Returns:
        What the process printed.
    """
    own = {name: str(folder / name.lower()) for name in CACHES}
    environment = {**os.environ, **own, "CONVOY_DB": str(folder / f"{database}.db")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, json.dumps([net, batch, dtype, device, time_s, training])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{net}: {(done.stderr.strip().splitlines() or ['no error was printed'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def three_starts(net: str, batch: int, dtype: str, device: str) -> dict[str, dict[str, Any]]:
    """What three processes printed that start one after the other (`STARTS`)."""
    with tempfile.TemporaryDirectory() as folder:
        databases = dict(zip(STARTS, ("perf", "empty", "perf"), strict=True))
        return {
            start: measured(net, batch, dtype, device, Path(folder), database=database)
            for start, database in databases.items()
        }


def figures_of(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Median and extremes of each metric."""
    metrics = [(f"{start}_s", start, "first_s") for start in STARTS]
    metrics += [(f"{start}_cpu_s", start, "cpu_s") for start in STARTS]
    return {metric: spread([found[start][key] for found in rounds]) for metric, start, key in metrics}


def spread(values: list[float]) -> dict[str, float]:
    """Median and extremes of few values, as a recorder takes them."""
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p20": ordered[0], "p80": ordered[-1]}


def first_answer_table(rows: Sequence[Row], title: str) -> str:
    """Seconds to the first answer, and the largest overruns of `time_s`: a table for each commit."""
    commits = dict.fromkeys(row["commit"] for row in rows)
    return "\n\n".join(_commit_table([row for row in rows if row["commit"] == commit], title) for commit in commits)


def _commit_table(rows: Sequence[Row], title: str) -> str:
    nets: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        name = row["subject"] if row["dtype"] == "fp32" else f"{row['subject']} {row['dtype']}"
        nets.setdefault((name, row["batch"]), {})[row["metric"]] = f"{float(row['p50']):.2f}"
    columns = dict.fromkeys(row["metric"] for row in rows)
    heads = [WORDS.get(name, name.replace("_", " ").replace("overrun", "time over a limit of")) for name in columns]
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['protocol']}",
        "",
        f"| net | batch | {' | '.join(heads)} |",
        f"|{'---|' * (2 + len(heads))}",
    ]
    lines += [f"| {' | '.join((*key, *(found.get(name, '') for name in columns)))} |" for key, found in nets.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nets", default="resnet18,mobilenet_v2,resnet50")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", default="", help="values of time_s, separated by commas")
    parser.add_argument("--training", action="store_true", help="with --times: training steps too")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes for each first answer")
    parser.add_argument("--note", default="", help="on the state of the machine")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    compile_package(Path(convoy.__file__).parent)
    compile_installed_packages()
    recorder: Recorder | None = None
    for net in options.nets.split(","):
        case = (net, options.batch, options.dtype, options.device)
        rounds = [three_starts(*case) for _ in range(options.rounds)]
        recorder = recorder or recorder_for(rounds[0]["first"], options.folder)
        add_net(recorder, case, rounds, options)
        recorder.write()  # a run that is cut short keeps the nets before
    assert recorder is not None
    print(recorder.path)


def recorder_for(found: dict[str, Any], folder: Path | None) -> Recorder:
    """The recorder of a run, from what its first process printed."""
    return Recorder(
        "first-answer",
        device=found["device"],
        versions=found["versions"],
        protocol=f"a fresh process each, bytecode compiled, {usable_cores()} cores",
        folder=folder,
        machine={"host": host()},
    )


def add_net(
    recorder: Recorder,
    case: tuple[str, int, str, str],
    rounds: Sequence[dict[str, dict[str, Any]]],
    options: argparse.Namespace,
) -> None:
    """Record and print a net's figures; with `--times`, measure its overruns."""
    net, batch, dtype, _ = case
    about: dict[str, Any] = {
        "subject": net, "provider": "convoy", "batch": batch, "dtype": dtype, "processes": "own",
    }  # fmt: skip
    used = sum(found["stored"]["stored"] for found in rounds)
    started = f"the stored plan was used in {used} of {len(rounds)} rounds"
    load = f"load {os.getloadavg()[0]:.1f} on {usable_cores()} cores"
    note = "; ".join(filter(None, (options.note, load, started)))
    for metric, figures in figures_of(rounds).items():
        recorder.add(**about, metric=metric, unit="s", note=note, **figures)
        print(f"{net:20} {metric:12} {figures['p50']:8.2f} s   {note}", flush=True)
    for time_s in (float(word) for word in options.times.split(",") if word):
        for training in (False, True) if options.training else (False,):
            with tempfile.TemporaryDirectory() as folder:
                found = measured(*case, Path(folder), time_s=time_s, training=training)
            ratio = found["call_s"] / time_s
            metric = f"{'training_' if training else ''}overrun_{time_s:g}s"
            recorder.add(**about, metric=metric, unit="1", p50=ratio, note=note)
            print(f"{net:20} {metric:22} {ratio:6.2f}   {note}", flush=True)


if __name__ == "__main__":
    run_main(main)
