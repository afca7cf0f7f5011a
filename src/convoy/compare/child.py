"""The process of one framework: it builds and checks the net, then times it on request. JSON lines in and out.

The parent says {"do": ...} and is answered; before slow work the child says {"stage": ...}, so that a hang has a name.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

from convoy.compare.case import Case
from convoy.compare.frameworks import Entry
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, UnsupportedCaseError
from convoy.compare.process_memory import peak_bytes, restart_peak, trim

Say = Callable[[dict[str, Any]], None]

LEAST_SAMPLE_S: Final = 0.02
"""A sample repeats a call until it has lasted this long (as the end-to-end check of `convoy optimize`)."""

MOST_SINGLES: Final = 200
"""Calls of a round whose latencies are sent one by one: 15 rounds of them are enough for a 99th percentile."""

SETTLED_S: Final = 0.1
"""Calls that take less are preceded, in each round on a CPU, by one that is not timed: till then caches are another's."""

QUICK_CALLS: Final = 3
"""Timed calls of each way to set a framework, of which the fastest way is measured."""

WAYS_S: Final = 150.0
"""When building and trying ways has taken this long, no further way is tried."""

ENERGY_S: Final = 1.0
"""The energy counter is renewed every 0.02 to 0.1 s: this long, it is good to a few per cent."""

_NO_MEMORY = (
    "out of memory",
    "resource_exhausted",
    "can't allocate memory",
    "bad_alloc",
    "failed to allocate",
    "oom when",
)


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


Turns = Callable[[], contextlib.AbstractContextManager[None]]
"""Gives a context in which this process has the device for itself."""


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


def failure(error: BaseException, stage: str) -> dict[str, str]:
    """Status and reason of an exception; the user's own input is told apart, because no framework is to blame for it."""
    from convoy.errors import InputError

    words = f"{type(error).__name__}: {error}".strip()
    if isinstance(error, InputError):
        fields = {"argument": error.argument, "value": str(error.value), "expected": error.expected, "todo": error.todo}
        return {"status": "launch_error", "reason": words, **fields}
    if isinstance(error, UnsupportedCaseError):
        return {"status": "unsupported", "reason": str(error)}
    if isinstance(error, WrongResultError):
        return {"status": "wrong_result", "reason": str(error)}
    if isinstance(error, MemoryError) or any(word in words.lower() for word in _NO_MEMORY):
        return {"status": "out_of_memory", "reason": words[:4000]}
    status = {"import": "launch_error", "build": "compile_error"}.get(stage, "launch_error")
    return {"status": status, "reason": words[:4000]}


class WrongResultError(Exception):
    """No way to set the framework gave the right numbers."""


class FrameworkSession:
    """One framework with one case: the fastest way that is right, ready to be timed."""

    def __init__(self, case: Case, folder: Path, say: Say, turn: Turns = contextlib.nullcontext) -> None:
        self.case, self.say, self.turn = case, say, turn
        self.material = CaseInputs(folder, json.loads((folder / "facts.json").read_text(encoding="utf-8")))
        self.built: BuiltModel | None = None
        self._begin = time.perf_counter()

    def prepare(self, ways: list[FrameworkConfig]) -> None:
        """Build, check and try each way; keep the fastest, and tell the parent.

        Raises:
            WrongResultError: every way that could be built gave wrong numbers.
            Exception: whatever the first way raised, where none could be built.
        """
        best: dict[str, Any] = {}
        problems: list[tuple[str, Exception]] = []
        for index, way in enumerate(ways):
            if way.spare and best:
                continue
            if index and best and time.perf_counter() - self._begin > WAYS_S:
                best["notes"].append(f"not tried for want of time: {'; '.join(w.setting for w in ways[index:])}")
                break
            self.say({"stage": "build", "setting": way.setting})
            try:
                tried = self._try(way)
            except Exception as error:  # a way that fails leaves the others
                problems.append((way.setting, error))
                continue
            if not best or tried["call_s"] < best["call_s"]:
                best, self.built = {**tried, "notes": [*best.get("notes", []), *tried["notes"]]}, tried["built"]
            del tried
            gc.collect()
        if not best:
            raise problems[0][1]
        best["notes"] += [f"{setting}: {type(e).__name__}: {str(e)[:300]}" for setting, e in problems]
        del best["built"]
        best["notes"] = list(dict.fromkeys(best["notes"]))
        gc.collect()
        if self.built is not None and self.built.restart_peak is not None:
            self.built.restart_peak()
        trim()
        restart_peak()
        self.say({"ready": {**best, "ways": len(ways)}})

    def _try(self, way: FrameworkConfig) -> dict[str, Any]:
        from convoy.compare.checking import check

        with self.turn() if way.chooses else contextlib.nullcontext():
            start = time.perf_counter()
            built = way.build()
            outputs = built.check()
            compile_s = time.perf_counter() - start
        error, wrong = check(self.case, self.material, outputs)
        if wrong:
            raise WrongResultError(wrong)
        del outputs
        with self.turn():
            _timed(built, 1)
            call_s = min(_timed(built, 1) for _ in range(QUICK_CALLS))
        return {
            "built": built,
            "setting": way.setting + (f", {built.setting}" if built.setting else ""),
            "compile_s": compile_s,
            "error": error,
            "call_s": call_s,
            "notes": list(built.notes),
            "detail": built.detail,
        }

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take samples, or return the other measurements."""
        assert self.built is not None
        if message["do"] == "sample":
            return {"samples": self.samples(int(message["rounds"]))}
        return {"finished": self.finish(message)}

    def samples(self, rounds: int) -> dict[str, list[float]]:
        """Milliseconds by metric, a value a round, and of every call.

        `latency_ms`: a call that is waited for, the mean of a round. `call_ms`: a call among calls that follow each other.
        `replay_ms`: the same of the captured graph alone, where there is one. `single_ms`: each call that was waited for.
        """
        built = self.built
        assert built is not None
        calls = max(1, round(LEAST_SAMPLE_S / max(_timed(built, 1), 1e-7)))
        found: dict[str, list[float]] = {"latency_ms": [], "call_ms": [], "single_ms": []}
        latencies = found["latency_ms"]
        for _ in range(rounds):
            if self.case.device == "cpu" and (not latencies or latencies[-1] * calls < SETTLED_S * 1e3):
                _timed(built, 1)
            singles = [_timed(built, 1) * 1e3 for _ in range(calls)]
            latencies.append(sum(singles) / calls)
            found["single_ms"] += singles[:MOST_SINGLES]
            found["call_ms"].append(_timed(built, calls) / calls * 1e3 if built.wait is not None else latencies[-1])
            if built.replay is not None:
                found.setdefault("replay_ms", []).append(_timed(built, calls, built.replay) / calls * 1e3)
        return found

    def finish(self, message: dict[str, Any]) -> dict[str, Any]:
        """Peak memory, time by layer kind, and energy of a call."""
        built = self.built
        assert built is not None
        found: dict[str, Any] = {}
        found["peak_memory_bytes"] = built.peak_memory() if built.peak_memory is not None else peak_bytes()
        if self.case.device == "cuda":
            found["energy_j"] = self._energy(str(message.get("bus_id", "")))
        if built.kinds is not None and message.get("kinds", True):
            try:
                found["kinds"] = built.kinds()
            except Exception as error:  # a profiler that fails costs its figures alone
                found["note"] = f"no time by layer kind: {type(error).__name__}: {str(error)[:300]}"
        return found

    def _energy(self, bus_id: str) -> float | None:
        from convoy.compare.energy import joules_counter

        counter = joules_counter(bus_id)
        if counter is None or self.built is None:
            return None
        calls = max(1, round(LEAST_SAMPLE_S / max(_timed(self.built, 1), 1e-7)))
        done, start, before = 0, time.perf_counter(), counter()
        while time.perf_counter() - start < ENERGY_S:
            _timed(self.built, calls)
            done += calls
        return (counter() - before) / done


def _timed(built: BuiltModel, calls: int, run: Callable[[], object] | None = None) -> float:
    """Seconds of some calls and one wait."""
    run = run or built.run
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if built.wait is not None:
        built.wait()
    return time.perf_counter() - start


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
