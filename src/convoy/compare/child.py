"""The process of one framework: it builds and checks the net, then times it on request. JSON lines in and out.

The parent says {"do": ...} and is answered; before slow work the child says {"stage": ...}, so that a hang has a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from convoy.compare.case import Case
from convoy.compare.child_failure import failure
from convoy.compare.framework_session import FrameworkSession, Say, Turns
from convoy.compare.frameworks import Entry


def main() -> None:
    """Serve until the parent ends this process, or is gone."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # the parent must not read what libraries print
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when an interrupted run ends

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    serve(json.loads(lines.get()), say, lines.get)


def _listen(lines: queue.SimpleQueue[str]) -> None:
    """Forward the parent's lines. When they end, the parent is gone and the current work is abandoned."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def serve(hello: dict[str, Any], say: Say, read: Callable[[], str]) -> None:
    """Carry out the first message, then the requests of the following lines."""
    case, folder = Case.from_dict(hello["case"]), Path(hello["folder"])
    _use_cores(case)
    stage = "import"
    try:
        if hello["role"] == "material":
            say({"material": _make_material(case, folder, turns(say, read))})
        elif hello["role"] == "export":
            say({"exported": _export(case, folder)})
        elif hello["role"] == "options":
            from convoy.compare.options.option_trial import serve_trials

            serve_trials(case, folder, say, read)
        else:
            framework = Entry(**hello["entry"]).load()
            say({"stage": "build"})
            stage = "build"
            session = FrameworkSession(case, folder, say, turns(say, read))
            session.prepare(list(framework.ways(case, session.material)))
            stage = "run"
            while line := read():
                say(session.answer(json.loads(line)))
    except Exception as error:  # whatever a framework raises is a row with its reason
        say({"failed": failure(error, stage)})


def turns(say: Say, read: Callable[[], str]) -> Turns:
    """Asks the parent for the device and waits for it."""

    @contextlib.contextmanager
    def turn() -> Generator[None]:
        say({"turn": True})
        read()
        try:
            yield
        finally:
            say({"turn": False})

    return turn


def _make_material(case: Case, folder: Path, turn: Turns) -> dict[str, Any]:
    from convoy.compare import case_inputs

    return case_inputs.make(case, folder, turn)


def _export(case: Case, folder: Path) -> float:
    from convoy.compare import case_inputs

    start = time.perf_counter()
    case_inputs.export_onnx(case, case_inputs.read(folder))
    return time.perf_counter() - start


def _use_cores(case: Case) -> None:
    """Keep to as many cores as threads were asked for: not every framework has a setting for that."""
    if case.device == "cpu" and hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if case.threads < len(cores):
            os.sched_setaffinity(0, set(cores[: case.threads]))
