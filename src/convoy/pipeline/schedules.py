"""Several schedules of one plan: they are timed, and the fastest one is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from convoy.deadline import Deadline
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.measurement import BuilderServers, ParallelCompile
from convoy.measurement.failure import is_out_of_memory
from convoy.measurement.processes.threaded_builds import builds_begun
from convoy.pipeline.check import end_to_end
from convoy.pipeline.net import Net
from convoy.pipeline.schedule_search import ScheduleSearch
from convoy.plan import Plan, Step
from convoy.program import CudaGraphProgram, PackedSteps, Program, build_program
from convoy.program.bind import bind
from convoy.program.bound_plan import BoundPlan
from convoy.program.occupancy import device_shares
from convoy.program.verification.verify_plan import verify_plan
from convoy.schedule import (
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


CHECK_SHARE = 0.4
"""Share of the time left that is kept for the check of the whole net."""


def build_fastest(
    plan: Plan,
    net: Net,
    settings: Settings,
    offered: SelectionProblem | None = None,
    collectives: Sequence[Collective] = (),
    deadline: Deadline | None = None,
    ahead: ParallelCompile | None = None,
) -> tuple[Plan, Program]:
    """Build the plan on one stream and, on a GPU, with several schedules on more streams; keep the fastest.

    The first schedules assume that launches do not slow each other down. Their times show how much they do. With that and the
    measured occupancy of each launch, further schedules start side work only while the device has free capacity. Each is timed in
    turn with the best so far, and replaces it if it is faster in four of five rounds.

    At effort `none` one schedule on several streams is tried, the one with the fewest, without measured occupancy.

    Under a memory budget there is one stream: selection did not count concurrent values or a workspace for each stream.

    Args:
        plan: the plan, on one stream.
        net: its net.
        settings: most streams and most memory.
        offered: further candidates. At effort full, side work may get a config that occupies less of the device; not with
            `deterministic`, where all schedules must have the same bits.
        collectives: all-reduces of results: work that they wait for goes first. They are not run here; the part of them that a
            schedule does not overlap is added to its time.
        deadline: no further schedule is tried that would probably not be timed by then; None: all are tried.
        ahead: what `builds_of` has begun to build of the plan.

    Returns:
        The plan with its steps' streams, and its program.
    """
    builds = ParallelCompile(net.target, settings) if ahead is None else nullcontext(ahead)
    with builds as builders, phase("schedules"):
        return _build_fastest(plan, net, settings, offered, collectives, builders, _search_until(deadline))


@contextmanager
def builds_of(
    plan: Plan, net: Net, settings: Settings, servers: BuilderServers | None = None
) -> Generator[ParallelCompile]:
    """Builds of a plan that are begun, for `build_fastest` in the block; the caller has other work until then.

    Threads build where engines allow it. At effort `none`, where nothing was measured and so nothing compiled before, other
    processes compile the rest.

    Args:
        plan: the plan, on one stream.
        net: its net.
        settings: `engines`, `effort`, and what `ParallelCompile` uses.
        servers: where further processes are forked from; None: servers of their own.
    """
    engines = [load_engine(step.config.engine, settings.engines) for step in plan.steps]
    with ParallelCompile(net.target, settings, servers) as ahead:
        if all(engine.trusted and not engine.builds_in_threads for engine in engines):
            yield ahead
            return
        verified = verify_plan(
            plan, net.captured.graph, net.regions_by_nodes, net.target, settings.engines, ask_engines=False
        )
        wanted = [(problem, step.config) for problem, step in zip(verified.problems, plan.steps, strict=True)]
        if settings.effort is Effort.NONE:
            elsewhere = [not each.trusted and not each.builds_in_threads for each in engines]
            ahead.begin([item for item, other in zip(wanted, elsewhere, strict=True) if other])
        with builds_begun(wanted, net.target, settings.engines) as begun:
            ahead.begun = begun
            yield ahead


def _search_until(deadline: Deadline | None) -> Deadline:
    """When the search for a schedule must end, so that there is time for the check."""
    if deadline is None or not deadline.is_limited:
        return deadline or Deadline()
    return deadline.earlier(CHECK_SHARE * deadline.left_s)


def _build_fastest(
    plan: Plan,
    net: Net,
    settings: Settings,
    offered: SelectionProblem | None,
    collectives: Sequence[Collective],
    ahead: ParallelCompile,
    deadline: Deadline,
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
    first = settings.effort is Effort.NONE
    taken = () if first or deadline.is_over else _shares(serial)
    contest = ScheduleSearch(
        plan.steps,
        serial,
        build,
        settings.stream_memory,
        _on_gpu,
        lambda steps: exposed_us(steps, collectives),
        deadline,
    )
    del serial  # the search frees it when another schedule is faster
    bounds = f"the critical path alone {longest / 1e3:.3f} ms"

    def bound_of(steps: Sequence[Step]) -> BoundPlan:
        candidate = dataclasses.replace(plan, steps=tuple(steps))
        return bind(candidate, net.captured, net.regions_by_nodes, net.target, settings.engines, packed, tuned=True)

    def challenge_all(
        words: str, steps: Sequence[Step], shares: Sequence[float] = (), model: ContentionModel | None = None
    ) -> None:
        for streams in range(2, 3 if first else settings.streams + 1):
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
            steps, taken = _with_smaller_configs(plan.steps, taken, offered, build)
            if steps != plan.steps:
                challenge_all(" with smaller side work", steps, taken, model)
    return _with_notes(contest, bounds)


def _with_notes(contest: ScheduleSearch, bounds: str) -> tuple[Plan, Program]:
    """The fastest program and its plan, whose notes say what else was tried."""
    program = contest.program
    chosen = dataclasses.replace(program.plan, notes=(*program.plan.notes, contest.words(bounds), *contest.notes))
    return chosen, Program(chosen, program.captured, program.runnable, program.resident_bytes)


def _with_smaller_configs(
    steps: Sequence[Step],
    taken: Sequence[float],
    offered: SelectionProblem,
    build: Callable[[Sequence[Step]], Program],
) -> tuple[Sequence[Step], Sequence[float]]:
    """The steps with configs for side work that occupy less of the device, and what each occupies."""
    variants = [(other, _shares_of(other, build)) for other in alternative_steps(steps, offered)]
    return use_smaller_configs(steps, taken, [(other, found) for other, found in variants if found])


def _shares(program: Program) -> tuple[float, ...]:
    """Part of the device that each step occupies; empty if the profiler cannot tell, or if there is too little memory."""
    runnable = program.runnable
    assert isinstance(runnable, CudaGraphProgram)
    try:
        return device_shares(runnable.eager, runnable.inputs)
    except Exception as error:  # everything: out of memory has several types; any other error is raised again
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


def _on_gpu(best: Program, challenger: Program) -> tuple[end_to_end.Latency, end_to_end.Latency]:
    programs = {"best": best, "challenger": challenger}
    timed = end_to_end.interleave(
        {name: program.runnable.replay for name, program in programs.items()},  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess, reportUnknownMemberType]
        cuda=True,
        rounds=ROUNDS,
    )
    return timed["best"], timed["challenger"]
