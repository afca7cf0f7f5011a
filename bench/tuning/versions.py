"""Do two versions of Convoy take the same time to tune, to start and to run? Question `versions`.

Each version tunes a net from nothing, with the compilers' caches empty too, in a process of its own; a second process starts from
what that left in the database and the caches, and times calls. Versions take turns, so that a busy host slows both. A version is
a folder that holds the package `convoy`, with the name that the results give it.

    python bench/tuning/versions.py before=path/to/old/src after=src [--nets resnet50,googlenet] [--batch 1] [--dtype fp16]
                                    [--turns 1] [--device cuda] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.bytecode import compile_package
from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.shared.rows import Row

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
"""Where Triton, Inductor and Convoy keep what they compiled."""

ROUNDS, CALLS = 15, 40

PROTOCOL = (
    f"one process to tune from nothing, one to start from its database; calls: median of {ROUNDS} rounds of {CALLS}"
)

CHILD = """
import json, statistics, sys, time, warnings
begun = time.perf_counter()
import torch
import convoy
from convoy.measurement import detect_target
from convoy.zoo import input_size, load_model
warnings.simplefilter("ignore")
net, batch, dtype, device, rounds, calls = json.loads(sys.argv[1])
size = input_size(net)
side = size if isinstance(size, int) else size[-1]
kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
torch.manual_seed(0)
model = load_model(net).eval().to(device, kind)
x = torch.randn(batch, 3, side, side, device=device, dtype=kind)
wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
wait()
imported = time.perf_counter()
fast = convoy.optimize(model, (x,))
fast(x)
wait()
tuned = time.perf_counter()
times = []
for _ in range(rounds):
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        fast(x)
    wait()
    times.append((time.perf_counter() - start) / calls * 1e6)
target = detect_target(device)
print("RESULT " + json.dumps({
    "file": convoy.__file__, "import_s": imported - begun, "optimize_s": tuned - imported, "call_us": times,
    "name": target.name, "versions": " ".join(f"{n}={v}" for n, v in target.versions),
}))
"""


def child(source: Path, folder: Path, request: list[Any]) -> dict[str, Any]:
    """Optimise and run in a new process of one version; its caches and its database lie in `folder`."""
    own = {name: str(folder / name.lower()) for name in CACHES}
    environment = {**os.environ, **own, "PYTHONPATH": str(source), "CONVOY_DB": str(folder / "perf.db")}
    command = [sys.executable, "-c", CHILD, json.dumps(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{source}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    if not Path(found["file"]).is_relative_to(source):
        raise SystemExit(f"{source}: Python took convoy from {found['file']}; is it installed editable?")
    return found


def turn(source: Path, request: list[Any]) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """One version's seconds and microseconds: tuned from nothing, then started from the database."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (child(source, Path(folder), request) for _ in range(2))
    figures = {"tuning_s": [first["optimize_s"]], "start_s": [second["optimize_s"]], "call_us": second["call_us"]}
    return figures, second


def versions_table(rows: Sequence[Row], title: str) -> str:
    """Seconds to tune and to start, and microseconds of a call, of each version."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row["subject"], row["dtype"], row["batch"], row["provider"].removeprefix("convoy."))
        found.setdefault(key, {})[row["metric"]] = row
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['versions']}; {rows[0]['protocol']}",
        "",
        "| net | dtype | batch | version | tuning, s | start, s | call, us: median, least, most |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, metrics in found.items():
        call = metrics["call_us"]
        calls = " / ".join(f"{float(call[name]):.0f}" for name in ("p50", "p20", "p80"))
        seconds = [f"{float(metrics[name]['p50']):.1f}" for name in ("tuning_s", "start_s")]
        lines.append(f"| {' | '.join((*key, *seconds, calls))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure in turn, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs=2, help="NAME=FOLDER")
    parser.add_argument("--nets", default="resnet50,googlenet")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="fp16", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    versions = {name: Path(folder).resolve() for name, _, folder in (one.partition("=") for one in options.version)}
    for source in versions.values():
        compile_package(source / "convoy")
    recorder: Recorder | None = None
    for net in options.nets.split(","):
        request = [net, options.batch, options.dtype, options.device, ROUNDS, CALLS]
        figures: dict[str, dict[str, list[float]]] = {name: {} for name in versions}
        for _ in range(options.turns):
            for name, source in versions.items():
                found, machine = turn(source, request)
                for metric, values in found.items():
                    figures[name].setdefault(metric, []).extend(values)
                recorder = recorder or Recorder(
                    "versions",
                    device=machine["name"],
                    versions=machine["versions"],
                    protocol=PROTOCOL,
                    folder=options.folder,
                )
        for name, metrics in figures.items():
            for metric, values in metrics.items():
                middle = statistics.median(values)
                print(f"{net} {name} {metric} {middle:.4g} of {len(values)}")
                assert recorder is not None
                recorder.add(
                    subject=net, batch=options.batch, dtype=options.dtype, provider=f"convoy.{name}", metric=metric,
                    unit=metric.rpartition("_")[2], p50=middle, p20=min(values), p80=max(values),
                    note="p20 and p80: least and most",
                )  # fmt: skip
    assert recorder is not None
    print(recorder.write())


if __name__ == "__main__":
    run_main(main)
