"""Where tuning spends its time: spans of one call, by phase, with a table that adds up to the total.

`phase` marks a span anywhere in the package. It costs about a microsecond, and nothing is kept unless a call records
(`recorded_profile`). One call tunes at a time (`convoy.pipeline.isolation`), so the recorder is the process's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

OTHER: Final = "other"
"""Name of the time between phases, in the table."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One run of a phase.

    Attributes:
        phase: what was done, such as `capture` or `build`.
        detail: on what, such as an engine's id; may be empty.
        thread: 0: the calling thread; others in the order of their first span.
        start_s: its start, seconds after the call's.
        duration_s: its time.
        own_s: its time without the spans inside it.
    """

    phase: str
    detail: str
    thread: int
    start_s: float
    duration_s: float
    own_s: float


@dataclass(frozen=True, slots=True)
class PhaseTotal:
    """All runs of one phase in the calling thread.

    Attributes:
        name: the phase, with its detail if it has one.
        own_s: seconds without the phases inside it; over all phases they add up to the total.
        runs: number of runs.
    """

    name: str
    own_s: float
    runs: int


@dataclass(frozen=True, slots=True)
class TuningProfile:
    """The spans of one call.

    Attributes:
        spans: in the order of their ends.
        total_s: wall time of the call, seconds.
    """

    spans: tuple[PhaseSpan, ...] = ()
    total_s: float = 0.0

    def totals(self) -> tuple[PhaseTotal, ...]:
        """The phases of the calling thread, the longest first, then the time outside of any phase (`other`)."""
        seconds: dict[str, float] = {}
        runs: dict[str, int] = {}
        for span in self.spans:
            if span.thread == 0:
                name = f"{span.phase}: {span.detail}" if span.detail else span.phase
                seconds[name] = seconds.get(name, 0.0) + span.own_s
                runs[name] = runs.get(name, 0) + 1
        found = [PhaseTotal(name, own_s, runs[name]) for name, own_s in seconds.items()]
        found.sort(key=lambda total: -total.own_s)
        rest = self.total_s - sum(total.own_s for total in found)
        return (*found, PhaseTotal(OTHER, max(0.0, rest), 1))

    def table(self) -> str:
        """The totals as lines of text: phase, seconds, share of the whole call, runs."""
        rows = [(total.name, total.own_s, str(total.runs)) for total in self.totals()]
        rows.append(("total", self.total_s, ""))
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{'phase':<{width}}  seconds  share   runs"]
        whole = self.total_s or 1.0
        lines += [f"{name:<{width}}  {own_s:7.3f}  {own_s / whole:5.1%}  {runs:>5}" for name, own_s, runs in rows]
        return "\n".join(line.rstrip() for line in lines)


class ProfileRecorder:
    """Collects the spans of one call, from all threads."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._spans: list[PhaseSpan] = []
        self._threads: dict[int, int] = {threading.get_ident(): 0}
        self._inside: dict[int, list[float]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str, detail: str) -> Generator[None]:
        """Record the block as one span."""
        thread = threading.get_ident()
        stack = self._inside.setdefault(thread, [])
        stack.append(0.0)
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            inside = stack.pop()
            if stack:
                stack[-1] += took
            with self._lock:
                lane = self._threads.setdefault(thread, len(self._threads))
                self._spans.append(PhaseSpan(name, detail, lane, begin - self._start, took, max(0.0, took - inside)))

    def profile(self) -> TuningProfile:
        """The spans so far."""
        with self._lock:
            return TuningProfile(tuple(self._spans), time.perf_counter() - self._start)


class _Current:
    """The recorder of the call that runs now."""

    recorder: ProfileRecorder | None = None


@contextmanager
def recorded_profile() -> Generator[ProfileRecorder]:
    """Record the phases of the block. Inside another recorded call, its recorder goes on."""
    outer = _Current.recorder
    if outer is not None:
        yield outer
        return
    _Current.recorder = recorder = ProfileRecorder()
    try:
        yield recorder
    finally:
        _Current.recorder = None


@contextmanager
def phase(name: str, detail: str = "") -> Generator[None]:
    """Mark a block as a phase of tuning; nested phases are not counted twice.

    Args:
        name: what is done.
        detail: on what; may be empty.
    """
    recorder = _Current.recorder
    if recorder is None:
        yield
        return
    with recorder.phase(name, detail):
        yield
