"""Several schedules of one plan: they are timed, and the fastest one is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch

from convoy.errors import CompileError
from convoy.measurement import ParallelCompile
from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline.check import end_to_end
from convoy.pipeline.net import Net
from convoy.pipeline.schedule_memory import ScheduleMaker, fit_in_memory
from convoy.plan import Plan, Step
from convoy.program import CudaGraphProgram, PackedSteps, Program, build_program
from convoy.program.bind import bind
from convoy.program.bound_plan import BoundPlan
from convoy.program.lifetimes import peak_bytes
from convoy.program.occupancy import device_shares
from convoy.program.runnable_program import eager_of
from convoy.schedule import (
    MAX_ORDERS,
    Collective,
    ContentionModel,
    alternative_steps,
    critical_us,
    device_us,
    exposed_us,
    fit_contention,
    parallel_steps,
    use_smaller_configs,
)
from convoy.selection import SelectionProblem
from convoy.settings import Effort, Settings
from convoy.tuning_profile import phase

WORTHWHILE = 0.97
"""Share of the serial time that the critical path must stay under for more streams to be tried: less is lost to events."""

ROUNDS = 7
"""Rounds in which a schedule is timed beside the best so far: whole nets vary by a percent or two, schedules by tens."""


def build_fastest(
    plan: Plan,
    net: Net,
    settings: Settings,
    offered: SelectionProblem | None = None,
    collectives: Sequence[Collective] = (),
) -> tuple[Plan, Program]:
    """Build the plan on one stream and, on a GPU, with several schedules on more streams; keep the fastest.

    The first schedules assume that launches do not slow each other down. Their times show how much they do. With that and the
    measured occupancy of each launch, further schedules start side work only while the device has free capacity. Each is timed in
    turn with the best so far, and replaces it if it is faster by more than the spread.

    Under a memory budget there is one stream: selection did not count concurrent values or a workspace for each stream.

    Args:
        plan: the plan, on one stream.
        net: its net.
        settings: most streams and most memory.
        offered: further candidates. At effort full, side work may get a config that occupies less of the device; not with
            `deterministic`, where all schedules must have the same bits.
        collectives: all-reduces of results: work that they wait for goes first. They are not run here; the part of them that a
            schedule does not overlap is added to its time.

    Returns:
        The plan with its steps' streams, and its program.
    """
    with ParallelCompile(net.target, settings) as ahead, phase("schedules"):
        return _build_fastest(plan, net, settings, offered, collectives, ahead)


def _build_fastest(
    plan: Plan,
    net: Net,
    settings: Settings,
    offered: SelectionProblem | None,
    collectives: Sequence[Collective],
    ahead: ParallelCompile,
) -> tuple[Plan, Program]:
    packed: PackedSteps = {}

    def build(steps: Sequence[Step]) -> Program:
        candidate = dataclasses.replace(plan, steps=tuple(steps))
        return build_program(
            candidate, net.captured, net.regions_by_nodes, net.target, settings, packed, ahead, tuned=True
        )

    serial = build(plan.steps)
    longest, total = critical_us(plan.steps), sum(step.median_us for step in plan.steps)
    alone = settings.streams < 2 or settings.memory_budget_bytes is not None or longest > WORTHWHILE * total
    if net.target.device != "cuda" or alone:
        return serial.plan, serial
    taken = _shares(serial)
    contest = ScheduleSearch(
        plan.steps, serial, build, settings.stream_memory, _on_gpu, lambda steps: exposed_us(steps, collectives)
    )
    del serial  # the search frees it when another schedule is faster
    bounds = f"the critical path alone {longest / 1e3:.3f} ms"

    def bound_of(steps: Sequence[Step]) -> BoundPlan:
        candidate = dataclasses.replace(plan, steps=tuple(steps))
        return bind(candidate, net.captured, net.regions_by_nodes, net.target, settings.engines, packed, tuned=True)

    def challenge_all(
        words: str, steps: Sequence[Step], shares: Sequence[float] = (), model: ContentionModel | None = None
    ) -> None:
        for streams in range(2, settings.streams + 1):
            spread = partial(parallel_steps, steps, streams, shares, model, collectives)
            contest.challenge_within(f"{streams}{words}", spread, steps, bound_of)

    challenge_all("", plan.steps)
    if taken:
        model = fit_contention(plan.steps, taken, contest.measured)
        bounds += f", all work on a full device {device_us(plan.steps, taken) / 1e3:.3f} ms"
        bounds += f", contention fitted as a device of {model.capacity:g}"
        challenge_all(" with admission", plan.steps, taken, model)
        # Two further configs of every launch take a minute to build; on an H100 they gave GoogLeNet's step 1 % (4b785fd).
        if offered is not None and settings.effort is Effort.FULL and not settings.deterministic:
            variants = [(steps, _shares_of(steps, build)) for steps in alternative_steps(plan.steps, offered)]
            steps, taken = use_smaller_configs(
                plan.steps, taken, [(steps, found) for steps, found in variants if found]
            )
            if steps != plan.steps:
                challenge_all(" with smaller side work", steps, taken, model)
    program = contest.program
    chosen = dataclasses.replace(program.plan, notes=(*program.plan.notes, contest.words(bounds), *contest.notes))
    return chosen, Program(chosen, program.captured, program.runnable, program.resident_bytes)


def _shares(program: Program) -> tuple[float, ...]:
    """Part of the device that each step occupies; empty if the profiler cannot tell, or if there is too little memory."""
    runnable = program.runnable
    assert isinstance(runnable, CudaGraphProgram)
    try:
        return device_shares(runnable.eager, runnable.inputs)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return ()


def _shares_of(steps: Sequence[Step], build: Callable[[Sequence[Step]], Program]) -> tuple[float, ...]:
    """The same for steps that are not built yet; empty if they cannot be built."""
    try:
        return _shares(build(steps))
    except (CompileError, torch.OutOfMemoryError):
        return ()


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
    ) -> None:
        self.steps, self.program, self.name = steps, program, "1"
        self.measured: list[tuple[Sequence[Step], float]] = []
        self.notes: list[str] = []
        self._build, self._clock, self._most_memory, self._exposed = build, clock, most_memory, exposed
        self._serial_bytes = _bytes(_bound(program))
        self._took: dict[str, float] = {}
        self._seen = {_order(steps)}

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
        tried = self._timed(steps)
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
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _whole(self, timed: end_to_end.Latency, steps: Sequence[Step]) -> end_to_end.Latency:
        return dataclasses.replace(timed, median_ms=timed.median_ms + self._exposed(steps) / 1e3)

    def words(self, bounds: str) -> str:
        """The measured times, for the plan's notes."""
        took = ", ".join(f"{name} {ms:.3f} ms" for name, ms in self._took.items())
        return f"streams: {self.name} (measured by number of streams: {took}; {bounds})"


def _on_gpu(best: Program, challenger: Program) -> tuple[end_to_end.Latency, end_to_end.Latency]:
    programs = {"best": best, "challenger": challenger}
    timed = end_to_end.interleave(
        {name: program.runnable.replay for name, program in programs.items()},  # type: ignore[union-attr]
        cuda=True,
        rounds=ROUNDS,
    )
    return timed["best"], timed["challenger"]


def _order(steps: Sequence[Step]) -> tuple[object, ...]:
    return tuple((step.results, step.config, step.stream, step.waits) for step in steps)


def _bound(program: Program) -> BoundPlan:
    assert program.runnable is not None
    return eager_of(program.runnable).bound


def _bytes(bound: BoundPlan) -> int:
    """Memory of a program while it runs: inputs (in training also parameters), packed weights, values, workspaces."""
    return peak_bytes(bound) + bound.resident_bytes + sum(spec.size_bytes for spec, _ in bound.inputs)
