"""Compile what `own_processes` will build, many cases side by side, so that its own builds find the compilers' caches.

Nothing is timed. Inductor's choices by time (`*.best_config`) are deleted afterwards, because others were at work: it makes them
anew when it has the device to itself. With `--providers convoy --jobs 1` Convoy tunes each case alone, and the database keeps its
plans.

    python bench/inference/prepare.py [--mode training] [--nets resnet50,googlenet] [--batch 1,32] [--dtype fp16]
        [--providers inductor.default,inductor.conv_1x1_as_mm] [--db FILE] [--tune-seconds N] [--jobs N] [--seconds N]

Set TORCHINDUCTOR_CACHE_DIR for both scripts, and give `own_processes` the same options and `--prepared`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.inference.own_processes import cases_of, entries_of, parser
from bench.shared.command_line import run_main

from convoy.compare import case_inputs
from convoy.compare.case import Case

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that names Inductor's cache. It must be set, so that nobody else's choices are deleted."""


def build(case: Case, names: str) -> None:
    """Build each provider of one case once, in this process; one that fails is named and leaves the others."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        case_inputs.make(case, folder)
        for entry in entries_of(names):
            start = time.perf_counter()
            try:
                for way in entry.load().ways(case, case_inputs.read(folder)):
                    if not way.spare:
                        way.build().run()
            except Exception as error:  # whatever a framework raises: its row will say it again
                print(f"{case.label()}: {entry.id}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            else:
                print(f"{case.label()}: {entry.id}: {time.perf_counter() - start:.0f} s", flush=True)


def forget_choices(cache: Path) -> int:
    """Delete Inductor's choices by time; returns how many files."""
    found = list(cache.rglob("*.best_config"))
    for path in found:
        path.unlink()
    return len(found)


def main() -> None:
    """Build all, several at once."""
    made = parser()
    made.description, made.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    made.set_defaults(jobs=max(1, (os.cpu_count() or 1) // 3))  # here: cases side by side
    made.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.one:
        build(Case.from_dict(json.loads(options.one)), options.providers)
        return
    cache = os.environ.get(CACHE, "")
    if not cache and any("inductor" in name for name in options.providers.split(",")):
        raise SystemExit(f"set {CACHE} to a folder: Inductor's choices there are deleted afterwards")
    end = time.monotonic() + (options.seconds or 1e9)

    def child(case: Case) -> None:
        left = end - time.monotonic()
        command = [sys.executable, "-W", "ignore", *sys.argv, "--one", json.dumps(case.to_dict())]
        try:
            subprocess.run(command, check=False, timeout=max(left, 0.0))
        except subprocess.TimeoutExpired:
            print(f"{case.label()}: no time was left", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(child, cases_of(options)))
    if cache:
        print(f"forgot {forget_choices(Path(cache))} choices of Inductor", flush=True)


if __name__ == "__main__":
    run_main(main)
