"""How long the tests on a GPU take: tests/gpu and the fuzz of its engines, in four phases, each with its count and its seconds.

Engines are tested by several processes at once; most of their time is compiling on the host. Programs and comparisons need a
quieter GPU, so fewer processes share it. Tests of training on several GPUs use two at most. Tests that limit or count its
memory run alone. Where there are several GPUs, the processes of the first two phases are spread over them, and each sees one.

    python bench/gpu_tests/gpu_tests.py [--only engines programs distributed memory] [--processes N] [--limit SECONDS]
                                        [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from convoy.measurement import detect_target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.record import Recorder

ROOT = Path(__file__).parents[2]
PROTOCOL = "pytest -m gpu, wall time of each phase, compiled code not cached before the run"


@dataclass(frozen=True, slots=True)
class Phase:
    """Tests that run together.

    Attributes:
        name: how the results call it.
        paths: where the tests are, relative to the repository.
        processes: how many share a GPU, at most; 0 tests in pytest's own process, which sees all GPUs.
    """

    name: str
    paths: tuple[str, ...]
    processes: int


PHASES = (
    Phase("engines", ("tests/gpu/engines", "tests/fuzz"), 14),
    Phase("programs", ("tests/gpu/program", "tests/gpu/package", "tests/gpu/prune", "tests/gpu/compare"), 4),
    Phase("distributed", ("tests/gpu/distributed",), 0),
    Phase("memory", ("tests/gpu/measurement",), 0),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a phase's tests did; `ended` is false where the time limit stopped them."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    ended: bool


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")) if named else tuple(str(index) for index in range(torch.cuda.device_count()))


def run(phase: Phase, limit_s: float, log: Path, gpus: tuple[str, ...]) -> Outcome:
    """Run one phase, its processes spread over `gpus`; pytest's output goes to `log`."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--durations=20", *phase.paths]
    command += ["-n", str(phase.processes * len(gpus)), "--dist", "worksteal"]
    spread = {"CONVOY_TEST_GPUS": ",".join(gpus)} if phase.processes else {}
    environment = {**os.environ, **spread}
    start = time.perf_counter()
    with log.open("w") as output:
        try:
            subprocess.run(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return counted_so_far(log.read_text(errors="replace"), time.perf_counter() - start)
    return counted(log.read_text(errors="replace"), time.perf_counter() - start)


def verdicts(output: str) -> list[tuple[str, str]]:
    """Each test that has ended and its verdict, in pytest's words, from the lines that `-v` and `-n` print."""
    return [(test, word) for word, test in re.findall(r"^\[gw\d+\] .*?\] (\w+) (\S+)", output, re.MULTILINE)]


def counted_so_far(output: str, seconds: float) -> Outcome:
    """The numbers of a run that the time limit stopped."""
    words = [word for _, word in verdicts(output)]
    failed = words.count("FAILED") + words.count("ERROR")
    return Outcome(words.count("PASSED"), failed, words.count("SKIPPED"), seconds, ended=False)


def counted(output: str, seconds: float) -> Outcome:
    """The numbers in the last line of pytest's output; a run without them did not end."""
    last = output.strip().splitlines()[-1] if output.strip() else ""
    found = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    failed = found.get("failed", 0) + found.get("error", 0)
    return Outcome(found.get("passed", 0), failed, found.get("skipped", 0), seconds, ended=bool(found))


def main() -> int:
    """Run the phases, print a line each, write the CSV; the exit status is 1 unless every test passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [phase.name for phase in PHASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="phases to run")
    parser.add_argument("--processes", type=int, default=14, help="processes a GPU that test engines at once")
    parser.add_argument("--limit", type=float, default=3600, help="seconds that all phases may take together")
    parser.add_argument("--folder", type=Path, help="where to write the CSV and the logs")
    options = parser.parse_args()
    gpus = visible_gpus()
    target = detect_target("cuda")
    torch.cuda.empty_cache()
    versions = " ".join(f"{name}={version}" for name, version in target.versions)
    protocol = f"{PROTOCOL}; {len(gpus)} GPUs" if len(gpus) > 1 else PROTOCOL
    recorder = Recorder("gpu-tests", device=target.name, versions=versions, protocol=protocol, folder=options.folder)
    logs = options.folder or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + options.limit
    green = True
    for phase in (phase for phase in PHASES if phase.name in options.only):
        if phase.name == "engines":
            phase = replace(phase, processes=options.processes)
        log = logs / f"{phase.name}.log"
        outcome = run(phase, max(1.0, end - time.perf_counter()), log, gpus)
        right = outcome.ended and outcome.failed == 0 and outcome.passed > 0
        green &= right
        words = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
        words = words if outcome.ended else f"stopped after {options.limit:.0f} s: {words} until then"
        print(f"{phase.name}: {words} in {outcome.seconds:.0f} s ({log})", flush=True)
        for test, word in verdicts(log.read_text(errors="replace")):
            if word in ("FAILED", "ERROR"):
                print(f"  {word} {test}", flush=True)
        recorder.add(
            subject=phase.name, provider="convoy", metric="tests_s", unit="s", p50=outcome.seconds, ok=right, note=words
        )
        recorder.write()
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
