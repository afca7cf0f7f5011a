"""Measures every figure of the README and the documentation again, at one commit, in calls of some minutes.

    python bench/all.py --list                                 what is missing at this commit, and how long it may take
    python bench/all.py --minutes 10 --folder DIR --db FILE    as many missing jobs as fit; the next call goes on

A job is one benchmark script with its arguments. `DIR/all.json` holds the jobs that have ended, with the commit: a job that was
measured at another commit is missing. A job that fails is named with its reason and does not stop the others. Results go to DIR.
When all is there, copy its CSV files to bench/results and run bench/pages/draw_figures.py and bench/pages/write_tables.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the repository, which holds the package `bench`

from convoy.compare.runs.manifest import commit

STATE = "all.json"

WHOLE = "bench/inference/own_processes.py"
ONE = "bench/inference/inference.py"
NETS = (
    "alexnet", "vgg16", "vgg19", "googlenet", "resnet50", "inception_v3", "mobilenet_v2", "densenet121", "efficientnet_b0",
    "convnext_tiny", "regnet_y_3_2gf",
)  # fmt: skip
TRAINED = ("alexnet", "googlenet", "resnet50", "inception_v3", "densenet121", "mobilenet_v2", "convnext_tiny")
PEERS = "torch.graph,torch.graph.nhwc,inductor.default,inductor.conv_1x1_as_mm,inductor.coordinate-descent"


@dataclass(frozen=True, slots=True)
class Job:
    """One script with its arguments.

    Attributes:
        name: unique, for people and for the state file.
        minutes: that it may take; one is begun only with so many left.
        arguments: script and arguments; `{folder}`, `{db}`, `{run}` and `{seconds}` are filled in.
        gpus: how many it needs; 0: none.
    """

    name: str
    minutes: float
    arguments: tuple[str, ...]
    gpus: int = 1


def _whole(mode: str, net: str, dtype: str, batches: str, minutes: float) -> Job:
    """A net by all providers in processes of their own."""
    tail = ("--nets", net, "--dtype", dtype, "--batch", batches, "--db", "{db}", "--tune-seconds", "120")
    common = ("--run", "{run}", "--folder", "{folder}", "--seconds", "{seconds}", "--together", "2")
    providers = ("--providers", f"convoy,{PEERS},jax" if mode == "inference" else f"convoy,{PEERS}")
    return Job(f"{mode} {net} {dtype} {batches}", minutes, (WHOLE, "--mode", mode, *tail, *providers, *common))


def jobs() -> list[Job]:
    """Every job, the headline's first."""
    found = [
        _whole("inference", net, dtype, batches, 6.0)
        for dtype, batches in (("fp16", "1,32"), ("fp32", "1,32"), ("fp16", "8,128"))
        for net in NETS
    ]
    found += [_whole("training", net, dtype, "32,128", 8.0) for dtype in ("bf16", "fp32") for net in TRAINED]
    one = (
        "--dtype",
        "fp16",
        "--batch",
        "1,32",
        "--db",
        "{db}",
        "--folder",
        "{folder}",
        "--seconds",
        "{seconds}",
        "--ablation",
    )
    found += [Job(f"inference {net} one process", 5.0, (ONE, "--nets", net, *one)) for net in NETS]
    here, timed = ("--folder", "{folder}"), ("--seconds", "{seconds}", "--folder", "{folder}")
    first = ("--device", "cuda", "--nets", "resnet18,timm:selecsls42b,densenet169")
    pruned = ("bench/pruned/pruned.py", "--device", "cuda", "--batches", "1", "--db", "{db}")
    cpu = (WHOLE, "--device", "cpu", "--dtype", "fp32", "--batch", "1,8", "--run", "{run}")
    found += [
        Job("last reads", 2.0, ("bench/inference/last_reads.py", "--db", "{db}", *here)),
        Job("guard cost", 4.0, ("bench/guard_cost/guard_cost.py", "--dtype", "fp32,fp16", *here)),
        Job("first answers", 6.0, ("bench/first_answer.py", *first, "--rounds", "3", *here)),
        Job(
            "time limits",
            9.0,
            ("bench/first_answer.py", *first, "--rounds", "1", "--times", "10,30", "--training", *here),
        ),
        Job("packages", 6.0, ("bench/package.py", "--device", "cuda", *here)),
        Job("serving", 6.0, ("bench/serving.py", "--device", "cuda", "--dtype", "fp16", *here)),
        Job("speed by time of tuning", 9.5, ("bench/tuning/tuned_share.py", "--device", "cuda", *here)),
        Job("retuning", 6.0, ("bench/tuning/retuning.py", *here)),
        Job("layers fp16", 9.0, ("bench/layers/layers.py", "fp16:half:32:resnet50", *timed)),
        Job("pruned", 9.0, (*pruned, *timed)),
        Job("pruned net", 5.0, ("bench/pruned/pruned_net.py", "--db", "{db}", *here)),
        Job("zero-skipping", 9.0, ("bench/zeroskip/zeroskip.py", "pairs", "deep", *timed)),
        Job("comparison", 9.5, ("bench/compare/compare.py", "--nets", "resnet50,googlenet", *here)),
        Job("CPU inference", 30.0, (*cpu, "--providers", "convoy,torch.eager,onnxruntime,openvino", *timed), gpus=0),
    ]
    return found


class State:
    """What has ended, by job; kept in a file."""

    def __init__(self, folder: Path, now: str) -> None:
        self.path, self.now = folder / STATE, now
        self.jobs: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def missing(self, gpus: int) -> list[Job]:
        """Jobs without a good end at this commit, that so many GPUs can do."""
        return [job for job in jobs() if job.gpus <= gpus and not self._done(job)]

    def ended(self, job: Job, code: int, seconds: float, reason: str = "") -> None:
        """Note the end of a job; written at once."""
        self.jobs[job.name] = {"commit": self.now, "code": code, "seconds": round(seconds, 1), "reason": reason}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.jobs, indent=1) + "\n")

    def _done(self, job: Job) -> bool:
        known = self.jobs.get(job.name, {})
        return known.get("commit") == self.now and known.get("code") == 0


def filled(job: Job, folder: Path, db: Path, seconds: float) -> list[str]:
    """The job's command line."""
    run = folder / f"{job.name.replace(' ', '-').replace(',', '-')}.run.json"
    names = {"folder": str(folder), "db": str(db), "run": str(run), "seconds": f"{seconds:.0f}"}
    return [sys.executable, *(word.format(**names) for word in job.arguments)]


def carry_out(state: State, chosen: Sequence[Job], folder: Path, db: Path, minutes: float) -> None:
    """Run jobs one after another while there is time for the next."""
    end = time.monotonic() + 60 * minutes
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    for job in chosen:
        left = end - time.monotonic()
        if left < 60 * job.minutes:
            continue
        print(f"== {job.name}", flush=True)
        begun = time.monotonic()
        try:
            code = subprocess.run(
                filled(job, folder, db, 60 * job.minutes), cwd=ROOT, env=environment, timeout=left, check=False
            ).returncode
            reason = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, reason = 124, "took longer than the call"
        state.ended(job, code, time.monotonic() - begun, reason)


def main() -> None:
    """List or carry out what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="", help="jobs whose name has this text")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "all")
    parser.add_argument("--db", type=Path, default=ROOT / "build" / "all" / "convoy.db")
    options = parser.parse_args()
    state = State(options.folder, commit())
    chosen = [job for job in state.missing(options.gpus) if options.only in job.name]
    if not options.list:
        carry_out(state, chosen, options.folder, options.db, options.minutes)
        chosen = [job for job in state.missing(options.gpus) if options.only in job.name]
    for job in chosen:
        known = state.jobs.get(job.name, {})
        why = f"  ({known['reason'] or 'another commit'}, {known['commit']})" if known else ""
        print(f"missing: {job.name}, up to {job.minutes:g} min{why}")
    print(
        f"{len(chosen)} of {len(jobs())} jobs are missing at {commit()}, up to {sum(job.minutes for job in chosen):.0f} min"
    )


if __name__ == "__main__":
    main()
