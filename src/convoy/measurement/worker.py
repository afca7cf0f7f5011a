"""The measuring process: reads jobs from standard input and writes rows to standard output, in JSON lines.

Whatever an engine prints goes to standard error, so that it cannot be taken for a row. It ends when its input does, or
when its parent dies.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when an interrupted measurement ends
    die_with_parent()
    hello = json.loads(sys.stdin.readline())
    import torch

    from convoy.measurement.runner import InProcessRunner
    from convoy.target import Target

    target = Target.from_dict(hello["target"])
    if target.device == "cpu":
        torch.set_num_threads(target.units)
    runner = InProcessRunner(
        target, extra_engines=tuple(hello["engines"]), announce=lambda index: _say(answers, {"at": index})
    )
    _say(answers, {"ready": True})
    for line in sys.stdin:
        _serve(json.loads(line), runner, answers)


def _serve(job: dict[str, Any], runner: Any, answers: TextIO) -> None:
    from convoy.measurement.protocol import Protocol
    from convoy.measurement.runner import Request
    from convoy.problem import EngineConfig, Knobs, parse_problem

    configs = tuple(EngineConfig(engine, version, Knobs.parse(knobs)) for engine, version, knobs in job["configs"])
    request = Request(parse_problem(job["problem"], job["text"]), configs, job["rounds"])
    for row in runner.measure(request, Protocol(**job["protocol"])):
        values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        values["config"] = [row.config.engine, row.config.version, str(row.config.knobs)]
        _say(answers, {"row": values})
    _say(answers, {"done": True})


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def die_with_parent() -> None:
    """Have the kernel end this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
