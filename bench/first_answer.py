"""How long until a net's first answer, and does `time_s` hold? Question `first-answer`, each figure in a fresh process.

- `first_s`: seconds of `convoy.optimize` at effort `none` and the first call, with torch imported; importing convoy counts.
- `first_cpu_s`: the processor time of the same, of the process and its children: what a busy machine disturbs less.
- `overrun_10s`, ...: wall time of `convoy.optimize` with `time_s=10` as a multiple of it; `training_overrun_10s` of
  `convoy.training_step`.

    python bench/first_answer.py [--nets resnet18,mobilenet_v2,resnet50] [--batch 1] [--device cpu] [--times 10,30] [--rounds 3]

Each process has an empty database of its own, so nothing but the shipped rows is known. Compilers' caches stay as they are.
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

from bench.shared.record import Recorder
from bench.shared.rows import Row

from convoy.compare.runs.manifest import host

WORDS = {"first_s": "first answer, s", "first_cpu_s": "processor time, s"}
"""Heads of the columns of the table."""

CHILD = """
import json, os, sys, time
import torch
from convoy.zoo import example_args, load_model
name, batch, device, time_s, training = json.loads(sys.argv[1])
model = load_model(name).to(device)
args = tuple(x.to(device) for x in example_args(model, batch=batch))
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
target = detect_target(device)
plan = fast.plan
print(json.dumps({
    "call_s": took, "first_s": whole, "cpu_s": cpu() - before, "baseline": plan.baseline, "device": target.name,
    "versions": " ".join(f"{key}={value}" for key, value in target.versions if key in ("torch", "cuda", "cudnn")),
}))
"""
"""Runs in a fresh process; prints one line of JSON."""


def measured(net: str, batch: int, device: str, time_s: float, *, training: bool) -> dict[str, Any]:
    """One fresh process.

    Args:
        net: a name that `convoy.zoo.load_model` takes.
        batch: images.
        device: `cpu` or `cuda`.
        time_s: `Settings.time_s`; 0: a first answer, at effort `none`.
        training: tune a training step, not inference.

    Returns:
        What the process printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CONVOY_DB": str(Path(folder) / "perf.db")}
        words = json.dumps([net, batch, device, time_s, training])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CHILD, words],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and extremes of few values, as a recorder takes them."""
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p20": ordered[0], "p80": ordered[-1]}


def first_answer_table(rows: Sequence[Row], title: str) -> str:
    """Seconds to the first answer, and the largest overruns of `time_s`."""
    nets: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        nets.setdefault((row["subject"], row["batch"]), {})[row["metric"]] = f"{float(row['p50']):.2f}"
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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", default="", help="values of time_s, separated by commas")
    parser.add_argument("--training", action="store_true", help="with --times: training steps too")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes for each first answer")
    parser.add_argument("--note", default="", help="on the state of the machine")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    recorder: Recorder | None = None
    times = [float(word) for word in options.times.split(",") if word]
    for net in options.nets.split(","):
        first = [measured(net, options.batch, options.device, 0.0, training=False) for _ in range(options.rounds)]
        recorder = recorder or Recorder(
            "first-answer",
            device=first[0]["device"],
            versions=first[0]["versions"],
            protocol=f"a fresh process each, empty database, {os.cpu_count()} cores",
            folder=options.folder,
            machine={"host": host()},
        )
        about: dict[str, Any] = {"subject": net, "provider": "convoy", "batch": options.batch, "processes": "own"}
        load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        note = "; ".join(filter(None, (options.note, load)))
        for metric, key in (("first_s", "first_s"), ("first_cpu_s", "cpu_s")):
            figures = spread([found[key] for found in first])
            recorder.add(**about, metric=metric, unit="s", note=note, **figures)
            print(f"{net:20} {metric:12} {figures['p50']:8.2f} s   {note}", flush=True)
        for time_s in times:
            for training in (False, True) if options.training else (False,):
                found = measured(net, options.batch, options.device, time_s, training=training)
                ratio = found["call_s"] / time_s
                metric = f"{'training_' if training else ''}overrun_{time_s:g}s"
                recorder.add(**about, metric=metric, unit="1", p50=ratio, note=note)
                print(f"{net:20} {metric:22} {ratio:6.2f}   {note}", flush=True)
    assert recorder is not None
    print(recorder.write())


if __name__ == "__main__":
    main()
