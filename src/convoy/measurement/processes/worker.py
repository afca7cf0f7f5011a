"""The measuring process: jobs come on standard input, rows go to standard output, both in JSON lines.

Output that an engine prints goes to standard error, so that it cannot be taken for a row. The process ends when its input
ends, also during a job: its parent is gone then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import load_engine
from convoy.engines.torch_flags import precision_owners
from convoy.errors import LaunchError
from convoy.measurement.device.heap import keep_freed_memory
from convoy.measurement.device.memory_limit import MemoryLimit, enter_memory_limit, lost_fraction
from convoy.measurement.in_process import InProcessRunner
from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request
from convoy.perfdb.record import to_record
from convoy.problem import ConvProblem, EngineConfig, Knobs, Problem, SubgraphProblem, parse_problem
from convoy.target import Target

Reply = Callable[[dict[str, Any]], None]

WATCHDOG_FACTOR = 4.0
"""A worker ends by itself after this many time limits without progress, in case its parent cannot end it."""


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when an interrupted measurement ends
    hello = json.loads(sys.stdin.readline())
    target = Target.from_dict(hello["target"])
    _mirror(hello, target)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    serve = _measurer(target, hello, say) if hello["role"] == "measure" else _builder(target, hello, say)
    say({"ready": True})
    jobs = _jobs()
    while True:
        serve(jobs.get())


def _mirror(hello: dict[str, Any], target: Target) -> None:
    """Make torch behave as in the parent process."""
    if target.device == "cpu":
        torch.set_num_threads(target.units)
        keep_freed_memory()
    elif hello["role"] == "measure":
        torch.cuda.set_device(hello["device_index"])
        if hello["memory_limit"] is not None:
            enter_memory_limit(MemoryLimit(**hello["memory_limit"]))
    with contextlib.suppress(RuntimeError):  # a torch without this setting, or with another backend's
        if "fp32_matmul" in hello:
            torch.set_float32_matmul_precision(hello["fp32_matmul"])
            torch.backends.cudnn.allow_tf32 = hello["cudnn_tf32"]
    for name, owner in precision_owners().items():  # after the older settings, which write these
        if owner.fp32_precision != hello["fp32_precision"][name]:
            owner.fp32_precision = hello["fp32_precision"][name]


def _jobs() -> queue.SimpleQueue[dict[str, Any]]:
    """A queue that a thread fills from the input. The end of the input ends the process at once."""
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            jobs.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return jobs


def _measurer(target: Target, hello: dict[str, Any], say: Reply) -> Callable[[dict[str, Any]], None]:
    patience = WATCHDOG_FACTOR * hello["timeout_s"] + 60
    phase_before = ""

    def announce(index: int, phase: str) -> None:
        nonlocal phase_before
        if phase != "time" or phase_before != "time":
            slow = {"data": 10, "build": 3}.get(phase, 1)  # an engine may take several time limits to build
            faulthandler.dump_traceback_later(patience * slow, exit=True)
        phase_before = phase
        say({"at": index, "phase": phase})

    memory_limit = hello["memory_limit"]
    runner = InProcessRunner(
        target,
        extra_engines=tuple(hello["engines"]),
        memory_bytes=None if memory_limit is None else memory_limit["tensors"],
        announce=announce,
    )

    def serve(job: dict[str, Any]) -> None:
        request = Request(_problem(job), tuple(map(_config, job["configs"])), job["rounds"], job["best_us"])
        try:
            for row in runner.measure(request, Protocol(**job["protocol"])):
                say({"row": to_record(row)})
        except LaunchError as error:  # the context is lost: a new process continues
            say({"lost": str(error)})
            os._exit(3)
        faulthandler.cancel_dump_traceback_later()
        say({"done": True, "gone": lost_fraction(runner.idle_bytes)})

    return serve


def _builder(target: Target, hello: dict[str, Any], say: Reply) -> Callable[[dict[str, Any]], None]:
    """Build and throw away; the compilers' caches on disk keep the results."""
    engines = tuple(hello["engines"])

    def serve(job: dict[str, Any]) -> None:
        config = _config(job["config"])
        try:
            build(load_engine(config.engine, engines), _problem(job), config.knobs, target)
        except Exception as error:  # the measuring process meets the same failure and records it
            say({"done": False, "reason": f"{type(error).__name__}: {error}"[:500]})
            return
        say({"done": True})

    return serve


def problem_fields(problem: Problem) -> dict[str, str]:
    """The fields from which `parse_problem` makes the problem again."""
    text = problem.text if isinstance(problem, SubgraphProblem) else ""
    if isinstance(problem, ConvProblem) and problem.mask is not None:
        text = problem.mask.text
    return {"problem": problem.key, "text": text}


def config_fields(config: EngineConfig) -> list[Any]:
    """A config as plain data."""
    return [config.engine, config.version, str(config.knobs)]


def _problem(job: dict[str, Any]) -> Problem:
    return parse_problem(job["problem"], job["text"])


def _config(fields: list[Any]) -> EngineConfig:
    engine, version, knobs = fields
    return EngineConfig(engine, version, Knobs.parse(knobs))
