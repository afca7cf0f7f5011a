"""One framework with one case, in its own process: the fastest way that is right, and its measurements."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

from convoy.compare.case import Case
from convoy.compare.child_failure import WrongResultError
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig
from convoy.compare.process_memory import peak_bytes, restart_peak, trim

Say = Callable[[dict[str, Any]], None]

Turns = Callable[[], contextlib.AbstractContextManager[None]]
"""Gives a context in which this process has the device for itself."""

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


class FrameworkSession:
    """One framework with one case: the fastest way that is right, ready to be timed."""

    def __init__(self, case: Case, folder: Path, say: Say, turn: Turns = contextlib.nullcontext) -> None:
        self.case, self.say, self.turn = case, say, turn
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self.material = CaseInputs(folder, facts, self._turn_of_a_build)
        self._waited_s = 0.0
        """Seconds for which the present build waited for the device."""
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

        self._waited_s = 0.0
        with self.turn() if way.chooses else contextlib.nullcontext():
            start = time.perf_counter()
            built = way.build()
            outputs = built.check()
            compile_s = time.perf_counter() - start - self._waited_s
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

    @contextlib.contextmanager
    def _turn_of_a_build(self) -> Generator[None]:
        start = time.perf_counter()
        with self.turn():
            self._waited_s += time.perf_counter() - start
            yield

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
