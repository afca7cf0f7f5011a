"""Pairs of an engine and a tool of compute-sanitizer, each in a process of its own, some side by side. Not a test module."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from convoy.engines.manifest import MANIFEST

_ROOT: Final = str(Path(__file__).parents[2])

TOOLS: Final = ("memcheck", "racecheck", "synccheck", "initcheck")

_ON_CPU: Final = ("pruned.c", "pruned.channels", "zeroskip.cpu")

ENGINES: Final = tuple(
    name for name in MANIFEST if name.startswith(("triton.", "cuda.", "pruned.", "zeroskip.")) and name not in _ON_CPU
)
"""All that launch kernels of ours."""

LEFT_OUT: Final = {
    (
        "racecheck",
        "pruned.sparse24",
    ): "it knows no order between cp.async.bulk (weights with their metadata, announced by an "
    "mbarrier) and the other warps' reads of shared memory, and reports every read of metadata; copies by tensor maps, as in "
    "cuda.implicit_gemm with the same barriers, it does know (FlashAttention: AI/RACECHECK_TMA_HAZARD.md)",
    (
        "initcheck",
        "pruned.channels_gpu",
    ): "its product is a library's: all that is reported is read inside cuDNN's own kernels, below PyTorch's conv2d",
}
"""Pairs that report what is no fault, with the reason."""

_OPTIONS: Final = {"memcheck": ("--report-api-errors", "no")}
"""cuda-core asks the driver for functions that an older one lacks: such answers are no faults of a kernel."""

_SUMMARY: Final = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_SECONDS: Final = 900
_LINES: Final = 40
"""Of the output of a pair that is not clean: so many of what was reported first, and of the end."""


@dataclass(frozen=True)
class Outcome:
    """Of one pair.

    Attributes:
        tool: empty for a run without any, which fills the compilers' caches.
        engine: id.
        word: `clean`, `findings`, `failed`, `too long` or `left out`.
        seconds: wall time.
        text: what it printed; why, where it was left out.
    """

    tool: str
    engine: str
    word: str
    seconds: float = 0.0
    text: str = ""

    @property
    def line(self) -> str:
        """For people."""
        launched = re.search(r"\d+ launches over \d+ shapes", self.text)
        what = self.text if self.word == "left out" else launched[0] if launched else ""
        return f"{self.tool or 'build':10} {self.engine:26} {self.word:9} {self.seconds:5.0f} s  {what}".rstrip()


def tools_for(engine: str, tools: Sequence[str]) -> list[str]:
    """Those that an engine is run under."""
    return [tool for tool in tools if (tool, engine) not in LEFT_OUT]


def command(script: Path, tool: str, engine: str) -> list[str]:
    """One pair's; without a tool, the launches alone."""
    watched = ["compute-sanitizer", "--tool", tool, *_OPTIONS.get(tool, ()), "--error-exitcode", "1"] if tool else []
    return [*watched, sys.executable, str(script), engine]


def verdict(tool: str, code: int, text: str) -> str:
    """An outcome's word: a tool that has nothing to report says so, and a program that did not end well is not clean."""
    counts = [int(first or second) for first, second in _SUMMARY.findall(text)]
    if any(counts):
        return "findings"
    return "failed" if code or (tool and not counts) else "clean"


def told(text: str) -> list[str]:
    """A tool's first report, without the host's frames, and how the run ended."""
    lines = [line for line in text.splitlines() if "Host Frame" not in line]
    if len(lines) <= 2 * _LINES:
        return lines
    first = [line for line in lines[:-_LINES] if line.startswith("=========")]
    return [*first[:_LINES], "...", *lines[-_LINES:]]


def run_pair(script: Path, tool: str, engine: str) -> Outcome:
    """Run one and print its line."""
    begun = time.monotonic()
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            command(script, tool, engine), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=_SECONDS, check=False,
        )  # fmt: skip
        word, text = verdict(tool, done.returncode, done.stdout), done.stdout
    except subprocess.TimeoutExpired as error:
        word, text = "too long", (error.stdout or b"").decode(errors="replace")
    outcome = Outcome(tool, engine, word, time.monotonic() - begun, text)
    print(outcome.line, flush=True)
    return outcome


def run_all(script: Path, engines: Sequence[str], tools: Sequence[str], jobs: int) -> int:
    """Every engine without a tool, then, where that ended well, under each; 0 where all is clean."""
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the path: it comes with the CUDA toolkit")
        return 2
    with ThreadPoolExecutor(jobs) as pool:
        builds = [pool.submit(run_pair, script, "", engine) for engine in engines]
        ready = (build.result().engine for build in as_completed(builds) if build.result().word == "clean")
        runs = [pool.submit(run_pair, script, tool, engine) for engine in ready for tool in tools_for(engine, tools)]
    watched = [run.result() for run in runs]
    for (tool, engine), reason in LEFT_OUT.items():
        if tool in tools and engine in engines:
            print(Outcome(tool, engine, "left out", text=reason).line)
    bad = [outcome for outcome in (*(build.result() for build in builds), *watched) if outcome.word != "clean"]
    for outcome in bad:
        print(f"\n{outcome.line}\n" + "\n".join(told(outcome.text)))
    clean = sum(outcome.word == "clean" for outcome in watched)
    print(f"\n{len(builds)} engines under {len(tools)} tools: {clean} clean, {len(bad)} not")
    return 1 if bad else 0
