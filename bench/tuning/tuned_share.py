"""How fast is a net after 10, 30 and 60 seconds of tuning, as a share of the tuned one? Question `tuned-share`.

Each net has a fresh process and an empty database. It makes a program at effort `none`, one with `time_s` of the first limit, and
goes on with `improve` up to each further limit; the last one is the tuned net. All programs are then timed in turn.

- `share_none`, `share_10s`, ...: the tuned net's time over that of the program at that moment.
- `replay_ms`: time of the tuned net; on a CPU of a call.
- `overrun_10s`, ...: wall time of the first call, as a multiple of its limit.

    python bench/tuning/tuned_share.py [--nets mobilenet_v2,regnet_y_400mf] [--batch 1] [--dtype fp16] [--device cuda]
                                       [--times 10,30,60,120] [--folder DIR]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.shared.rows import Row
from bench.shared.timed_code import whole_net_code

import convoy
from convoy.compare.runs.manifest import host
from convoy.measurement import detect_target
from convoy.program.runnable_program import Program
from convoy.target import usable_cores
from convoy.zoo import example_args, load_model

ROUNDS, LEAST_S = 15, 0.02

PROTOCOL = (
    f"a fresh process each, empty database; all programs in turn, median of {ROUNDS} rounds of at least {LEAST_S} s"
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def share_of(net: str, batch: int, dtype: str, device: str, times: Sequence[float]) -> dict[str, Any]:
    """Tune one net in this process; its programs' times in ms by moment, and what the first limit became."""
    model = load_model(net).eval().to(device, DTYPES[dtype])
    args = tuple(x.to(device, DTYPES[dtype]) for x in example_args(model, batch=batch))
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "none.db"
        programs = {"none": convoy.optimize(model, args, settings=convoy.Settings(effort="none", db=known)).programs[0]}
        start = time.perf_counter()
        settings = convoy.Settings(effort="full", time_s=times[0], db=Path(folder) / "tuned.db")
        fast = convoy.optimize(model, args, settings=settings)
        first_s = time.perf_counter() - start
        programs[f"{times[0]:g}s"] = fast.programs[0]
        for before, limit in itertools.pairwise(times):
            fast.improve(time_s=limit - before)
            programs[f"{limit:g}s"] = fast.programs[0]
    return {
        "ms": times_in_turn(programs, model, args),
        "first_s": first_s,
        "device": detect_target(device).name,
        "versions": " ".join(f"{key}={value}" for key, value in detect_target(device).versions),
    }


@torch.no_grad()
def times_in_turn(programs: dict[str, Program], model: torch.nn.Module, args: tuple[Any, ...]) -> dict[str, float]:
    """Milliseconds of each program, measured in turn: replays on a GPU, calls on a CPU; stock PyTorch where it was chosen."""

    def run_of(program: Program) -> Callable[[], object]:
        if program.runnable is None:
            return lambda: model(*args)
        return getattr(program.runnable, "replay", None) or (lambda: program(args, {}))

    runs = {moment: run_of(program) for moment, program in programs.items()}
    found: dict[str, list[float]] = {moment: [] for moment in runs}
    counts = {moment: max(1, round(LEAST_S / once(run, 3))) for moment, run in runs.items()}
    for _ in range(ROUNDS):
        for moment, run in runs.items():
            found[moment].append(once(run, counts[moment]) * 1e3)
    return {moment: statistics.median(values) for moment, values in found.items()}


def once(run: Callable[[], object], count: int) -> float:
    """Seconds a call of some calls and one wait."""
    synchronise()
    start = time.perf_counter()
    for _ in range(count):
        run()
    synchronise()
    return (time.perf_counter() - start) / count


def synchronise() -> None:
    """Wait for a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def shares(found: dict[str, float]) -> dict[str, float]:
    """The last program's time over that of each."""
    tuned = list(found.values())[-1]
    return {moment: tuned / ms for moment, ms in found.items()}


def tuned_share_table(rows: Sequence[Row], title: str) -> str:
    """Shares by net, and their geometric means."""
    moments = list(dict.fromkeys(row["metric"] for row in rows if row["metric"].startswith("share_")))
    nets: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        nets.setdefault((row["subject"], row["dtype"], row["batch"]), {})[row["metric"]] = float(row["p50"])
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['protocol']}",
        "",
        f"| net | dtype | batch | tuned, ms | {' | '.join(m.removeprefix('share_').replace('s', ' s') for m in moments)} |",
        f"|{'---|' * (4 + len(moments))}",
    ]
    for key, own in nets.items():
        cells = (f"{own[moment]:.2f}" if moment in own else "" for moment in moments)
        lines.append(f"| {' | '.join(key)} | {own.get('replay_ms', float('nan')):.3f} | {' | '.join(cells)} |")
    means = (statistics.geometric_mean([own[m] for own in nets.values() if m in own]) for m in moments)
    lines.append(f"| geometric mean | | | | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="mobilenet_v2,regnet_y_400mf")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="fp16", choices=DTYPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--times", default="10,30,60,120", help="limits in seconds, rising; the last one is the tuned net"
    )
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    times = [float(word) for word in given.times.split(",")]
    if given.one:
        print(json.dumps(share_of(given.one, given.batch, given.dtype, given.device, times)))
        return
    recorder: Recorder | None = None
    for net in given.nets.split(","):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--one", net], stdout=subprocess.PIPE, text=True, check=True
        )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
        recorder = recorder or Recorder(
            "tuned-share", device=found["device"], versions=found["versions"], protocol=PROTOCOL, folder=given.folder,
            machine={"host": host()}, code=whole_net_code(given.device),
        )  # fmt: skip
        add_net(recorder, net, given, found, times[0])
        recorder.write()  # a run that is cut short keeps the nets before


def add_net(recorder: Recorder, net: str, given: argparse.Namespace, found: dict[str, Any], first: float) -> None:
    """Record and print a net's figures."""
    about: dict[str, Any] = {
        "subject": net, "provider": "convoy", "batch": given.batch, "dtype": given.dtype, "processes": "own",
        "note": f"load {os.getloadavg()[0]:.1f} on {usable_cores()} cores",
    }  # fmt: skip
    for moment, share in shares(found["ms"]).items():
        recorder.add(**about, metric=f"share_{moment}", unit="1", p50=share)
    recorder.add(**about, metric="replay_ms", unit="ms", p50=list(found["ms"].values())[-1])
    recorder.add(**about, metric=f"overrun_{first:g}s", unit="1", p50=found["first_s"] / first)
    words = ", ".join(f"{moment} {share:.3f}" for moment, share in shares(found["ms"]).items())
    print(f"{net:20} {words}; the call with time_s={first:g} took {found['first_s']:.1f} s", flush=True)


if __name__ == "__main__":
    run_main(main)
