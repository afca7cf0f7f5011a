"""Build many candidates in parallel processes before one process measures them.

Engines that compile (`Engine.trusted` is False) leave their binaries in a cache on disk, keyed by source and options, so
that the measuring process finds them there. Failures are left to that process too: it meets them again, and records them.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from convoy.problem import EngineConfig, Problem, SubgraphProblem
from convoy.target import Target

BUILD_S = 120.0
"""Time for one build, after which its process is ended and replaced."""

Job = tuple[Problem, EngineConfig]


def prebuild(
    jobs: Sequence[Job],
    target: Target,
    *,
    extra_engines: tuple[str, ...] = (),
    processes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Build every job somewhere; returns how many were built.

    Args:
        jobs: problems with configs.
        target: what to build for.
        extra_engines: extra engines as `id=module:Class`.
        processes: how many at a time; by default one fewer than there are cores.
        on_progress: told (done, total).
    """
    count = min(len(jobs), processes or max(1, len(os.sched_getaffinity(0)) - 1))
    if count < 2:
        return 0  # a lone process gains nothing over the one that measures
    waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    for problem, config in jobs:
        waiting.put(_message(problem, config))
    for _ in range(count):
        waiting.put(None)
    built: list[bool] = []

    def work() -> None:
        hello = {"target": target.to_dict(), "engines": list(extra_engines)}
        worker = _Worker(hello)
        try:
            while (job := waiting.get()) is not None:
                built.append(worker.build(job))
                if on_progress:
                    on_progress(len(built), len(jobs))
        finally:
            worker.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(built)


class _Worker:
    """One building process: a job in, a line out; replaced when it crashes or hangs."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self._hello = hello
        self._process: subprocess.Popen[str] | None = None

    def build(self, job: dict[str, Any]) -> bool:
        """Whether the job was built."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        guard = threading.Timer(BUILD_S, process.kill)
        guard.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            guard.cancel()
        if not answer:
            self.close()
        return answer.strip() == "ok"

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            # One thread each: the cores are taken by the other builders.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "convoy.measurement.builder"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(self._hello) + "\n")
        return self._process


def _message(problem: Problem, config: EngineConfig) -> dict[str, Any]:
    return {
        "problem": problem.key,
        "text": problem.text if isinstance(problem, SubgraphProblem) else "",
        "engine": config.engine,
        "knobs": str(config.knobs),
    }
