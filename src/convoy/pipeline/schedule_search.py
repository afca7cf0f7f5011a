"""The search among schedules of one plan: each is timed in turn with the best so far."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from convoy.deadline import Deadline
from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline.check import end_to_end
from convoy.pipeline.schedule_memory import ScheduleMaker, fit_in_memory
from convoy.plan import Step
from convoy.program import Program
from convoy.program.bound_plan import BoundPlan
from convoy.program.lifetimes import peak_bytes
from convoy.program.runnable_program import eager_of
from convoy.schedule import MAX_ORDERS

LACK_OF_TIME: Final = "for lack of time"
"""End of the note of a schedule that was not tried because a call's time was nearly up."""

Clock = Callable[[Program, Program], tuple[end_to_end.Latency, end_to_end.Latency]]
"""Times the best program so far and another one in turn."""


class ScheduleSearch:
    """Searches schedules of one plan: each is timed in turn with the best so far. At most two are in memory.

    Args:
        steps: steps on one stream.
        program: their program.
        build: makes the program of a schedule.
        most_memory: most memory of a schedule, as a multiple of that of one stream.
        clock: times two programs.
        exposed: microseconds of a schedule that the clock does not measure.
        deadline: schedules that would not be timed by then are not tried.

    Attributes:
        steps: the best schedule so far.
        program: its program.
        measured: the schedules that were timed, with their times in microseconds.
        notes: schedules that were not used, and why.
    """

    def __init__(
        self,
        steps: tuple[Step, ...],
        program: Program,
        build: Callable[[Sequence[Step]], Program],
        most_memory: float,
        clock: Clock,
        exposed: Callable[[Sequence[Step]], float] = lambda steps: 0.0,  # noqa: ARG005
        deadline: Deadline | None = None,
    ) -> None:
        self.steps, self.program, self.name = steps, program, "1"
        self.measured: list[tuple[Sequence[Step], float]] = []
        self.notes: list[str] = []
        self._build, self._clock, self._most_memory, self._exposed = build, clock, most_memory, exposed
        self._serial_bytes = _bytes(_bound(program))
        self._took: dict[str, float] = {}
        self._seen = {_order(steps)}
        self._deadline, self._longest_s = deadline or Deadline(), 0.0

    def challenge_within(
        self, name: str, spread: ScheduleMaker, steps: Sequence[Step], bound_of: Callable[[Sequence[Step]], BoundPlan]
    ) -> None:
        """Try a schedule; if it holds too much memory, one with more of its steps on the first stream.

        Args:
            name: its name, for the notes.
            spread: makes it, with some steps on the first stream.
            steps: steps on one stream.
            bound_of: binds a schedule.
        """
        fitted = fit_in_memory(spread, steps, bound_of, _bytes, self._most_memory * max(1, self._serial_bytes))
        if fitted is None:  # its time may show that it would not be used anyway
            self.challenge(name, spread(home=(), tries=MAX_ORDERS))
            return
        if fitted.home:
            grown = fitted.wanted_bytes / max(1, self._serial_bytes)
            self.notes.append(
                f"streams: {name} would hold {grown:.2f} times the memory of one stream and stream_memory allows"
                f" {self._most_memory:g} times: {fitted.home} steps stay on the first stream"
            )
        self.challenge(name, fitted.steps)

    def challenge(self, name: str, steps: tuple[Step, ...]) -> None:
        """Try a schedule, unless it was tried before."""
        if _order(steps) in self._seen:
            return
        self._seen.add(_order(steps))
        if self._deadline.left_s <= self._longest_s:
            self.notes.append(f"streams: {name} was not tried {LACK_OF_TIME}")
            return
        begin = time.monotonic()
        tried = self._timed(steps)
        self._longest_s = max(self._longest_s, time.monotonic() - begin)
        if tried is None:
            torch.cuda.empty_cache()
            self.notes.append(
                f"streams: {name} does not fit in memory together with another schedule and was not tried"
            )
            return
        program, best, found = tried
        self.measured.append((steps, found.median_ms * 1e3))
        self._took.setdefault(self.name, best.median_ms)
        self._took[name] = found.median_ms
        if not end_to_end.is_faster(self._whole(found, steps), self._whole(best, self.steps)):
            return
        grown = _bytes(_bound(program)) / max(1, self._serial_bytes)
        if grown > self._most_memory:
            self.notes.append(
                f"streams: {name} would take {found.median_ms:.3f} ms instead of {best.median_ms:.3f} ms and {grown:.2f} times"
                f" the memory of one stream; stream_memory allows {self._most_memory:g} times"
            )
            return
        self.steps, self.program, self.name = steps, program, name

    def _timed(self, steps: Sequence[Step]) -> tuple[Program, end_to_end.Latency, end_to_end.Latency] | None:
        """A schedule's program, with the times of the best program and of it; None if both do not fit in memory."""
        try:
            program = self._build(steps)
            return program, *self._clock(self.program, program)
        except Exception as error:  # everything: out of memory has several types; any other error is raised again
            if not is_out_of_memory(error):
                raise
        return None

    def _whole(self, timed: end_to_end.Latency, steps: Sequence[Step]) -> end_to_end.Latency:
        return dataclasses.replace(
            timed, samples_ms=tuple(sample + self._exposed(steps) / 1e3 for sample in timed.samples_ms)
        )

    def words(self, bounds: str) -> str:
        """The measured times, for the plan's notes."""
        took = ", ".join(f"{name} {ms:.3f} ms" for name, ms in self._took.items())
        return f"streams: {self.name} (measured by number of streams: {took}; {bounds})"


def _order(steps: Sequence[Step]) -> tuple[object, ...]:
    return tuple((step.results, step.config, step.stream, step.waits) for step in steps)


def _bound(program: Program) -> BoundPlan:
    assert program.runnable is not None
    return eager_of(program.runnable).bound


def _bytes(bound: BoundPlan) -> int:
    """Memory of a program while it runs: inputs (in training also parameters), packed weights, values, workspaces."""
    return peak_bytes(bound) + bound.resident_bytes + sum(spec.size_bytes for spec, _ in bound.inputs)
