"""The net as one program beside the selected plan: PyTorch's own operators in each memory format, and Inductor's program.

Selection adds times of single launches. Whether a net cut up is faster than the net as one program is seen only when both run,
so they are timed in turn, and the fastest is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from convoy.engines.competition import competing_engines
from convoy.engines.manifest import BASELINE, load_engine
from convoy.errors import ConvoyError, SelectionError
from convoy.perfdb.row import Measurement
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.end_to_end import Latency, TimingLimits, interleave
from convoy.pipeline.check.end_to_end_check import EndToEndCheck
from convoy.pipeline.check.least_error import least_error
from convoy.pipeline.check.verify_predicted import BuiltPlan
from convoy.pipeline.net import Net
from convoy.pipeline.select import Choice, compared, make_plan
from convoy.plan import Plan
from convoy.problem import EngineConfig, Problem
from convoy.program import Program, build_program
from convoy.regions import Region
from convoy.regions.whole import PATTERN
from convoy.selection import Candidate, solve
from convoy.selection.quick_start import TIE
from convoy.settings import Effort, Settings, Solver
from convoy.support import Support
from convoy.tune import SearchResult
from convoy.tuning_profile import phase

CLOSE: Final = 1.25
"""A program whose measured time is this many times the plan's is not built: the plan's sum differs less from its time."""

SURELY_FASTER: Final = 2.0
"""From this speed-up over PyTorch's own run on, effort `none` does not try PyTorch's other memory format."""

FASTER_ON_A_CPU: Final = 1.05
"""The same on a CPU, where a run takes so long that the trial was 40 % of a first answer (ResNet-50 on two cores)."""

FIRST_ROUNDS: Final = 3
"""Rounds after which a program that is clearly slower than the plan is timed no longer."""

LEAST_LEFT_S: Final = 2.0
"""Seconds that a call must have left for a further program to be built."""


@dataclass(frozen=True, slots=True)
class Rival:
    """Another plan for a net.

    Attributes:
        choice: its selection: the net as one region, or another one.
        plan: its plan.
        label: a name for people; empty: the engine and the memory format of the net as one region.
    """

    choice: Choice
    plan: Plan
    label: str = ""

    @property
    def name(self) -> str:
        """For people."""
        if self.label:
            return self.label
        step = self.plan.steps[-1] if self.plan.steps[-1].kind == "region" else self.plan.steps[-2]
        return f"{step.config.engine} {step.layout}"


def whole_region(net: Net) -> Region | None:
    """The region of all nodes; None if the net has none."""
    nodes = tuple(node.name for node in net.captured.graph.nodes)
    return net.regions_by_nodes.get((PATTERN, nodes))


def rivals_of(net: Net, found: SearchResult, built: BuiltPlan, settings: Settings) -> list[Rival]:
    """The plans of the net as one program that may be faster than a selected one.

    Args:
        net: the net.
        found: measured times.
        built: the selected plan.
        settings: whose solver must be the exact one: another was asked for by name.
    """
    region = whole_region(net)
    enough = SURELY_FASTER if net.target.device == "cuda" else FASTER_ON_A_CPU
    is_sure = settings.effort is Effort.NONE and _gain(built) >= enough
    if region is None or built.wrong or settings.solver is not Solver.EXACT or is_sure:
        return []
    running = {(step.config, step.problem) for step in built.plan.steps if step.nodes == region.nodes}
    limit_us = CLOSE * built.plan.total_us
    made: list[Rival] = []
    for problem, row in _candidates(region, found, settings):
        known = row is not None and not row.predicted
        config = row.config if row is not None else _stock_config(problem, net, settings)
        if (
            config is None
            or (config, problem.key) in running
            or (row is not None and known and row.median_us > limit_us)
        ):
            continue
        rival = _rival(net, found, built.choice, settings, problem, config, row)
        if rival is not None:
            made.append(rival)
    return made


def _gain(built: BuiltPlan) -> float:
    return built.outcome.baseline.median_ms / built.outcome.optimized.median_ms


def _candidates(
    region: Region, found: SearchResult, settings: Settings
) -> Iterator[tuple[Problem, Measurement | None]]:
    """Problems of the whole net, each with its fastest row of each engine; PyTorch's own without a row, too."""
    competing = set(competing_engines(settings))
    for problem in region.problems:
        fastest: dict[str, Measurement] = {}
        for row in sorted(found.rows.get(problem.key, ()), key=lambda row: row.median_us):
            if row.ok and row.config.engine in competing:
                fastest.setdefault(row.config.engine, row)
        if BASELINE not in fastest and not settings.deterministic:
            yield problem, None
        yield from ((problem, row) for row in fastest.values())


def _stock_config(problem: Problem, net: Net, settings: Settings) -> EngineConfig | None:
    engine = load_engine(BASELINE, settings.engines)
    support: Support = engine.accepts(problem, net.target)
    return engine.config(engine.space(problem, net.target)[0]) if support else None


def _rival(
    net: Net,
    found: SearchResult,
    choice: Choice,
    settings: Settings,
    problem: Problem,
    config: EngineConfig,
    row: Measurement | None,
) -> Rival | None:
    """The plan of one candidate; None if a conversion is missing or the memory budget is too small."""
    at = next(i for i, region in enumerate(choice.problem.regions) if region.id.startswith(f"{PATTERN}(") and
              region.nodes == choice.problem.nodes)  # fmt: skip
    candidate = Candidate(
        region=at,
        problem=problem.key,
        config=config,
        layout=problem.layout,
        median_us=choice.strategies.get("baseline", choice.selection.total_us) if row is None else row.median_us,
        spread_us=0.0 if row is None else row.spread_us,
        workspace_bytes=0 if row is None else row.workspace_bytes,
        resident_bytes=0,
        predicted=row is None,
    )
    alone = replace(choice.problem, candidates=(candidate,))
    try:
        selection = solve(alone, "greedy")
    except SelectionError:
        return None
    only = replace(choice, problem=alone, selection=replace(selection, solver=choice.selection.solver))
    return Rival(only, make_plan(net, only, settings, (), found))


def _wins(rival: Rival, timed: Latency, plan: Latency, settings: Settings) -> bool:
    """Whether a rival is faster in four of five rounds, and by more than a tie if it takes a compiler to start."""
    engines = (load_engine(step.config.engine, settings.engines) for step in rival.plan.steps)
    clear = all(engine.starts_quickly for engine in engines) or timed.median_ms < (1 - TIE) * plan.median_ms
    return clear and end_to_end.is_faster(timed, plan)


_FAILURES: Final = (ConvoyError, RuntimeError, AssertionError, MemoryError)
"""Errors of a compiled program: of its build, its capture, its checks of strides, or for lack of memory."""

Timer = Callable[..., dict[str, Latency]]
"""`end_to_end.interleave`."""


def fastest_of(
    built: BuiltPlan,
    rivals: Sequence[Rival],
    check: EndToEndCheck,
    net: Net,
    settings: Settings,
    limits: Callable[[], TimingLimits],
    timer: Timer = interleave,
    contest: Contest | None = None,
) -> BuiltPlan:
    """The selected plan, or the rival that is faster and right; with a note of all their times.

    Args:
        built: the selected plan.
        rivals: other plans.
        check: makes and compares runs.
        net: the net.
        settings: passed to the programs.
        limits: how long programs are timed; asked when they are built.
        timer: times several functions in turn.
        contest: how the rivals are called, timed and compared; None: as the net as one program.
    """
    contest = contest or WHOLE
    programs: dict[str, Program] = {}
    by_name = {rival.name: rival for rival in rivals}
    for name, rival in by_name.items():
        if limits().most_s < LEAST_LEFT_S and rival.plan.steps[-1].config.engine != BASELINE:
            continue
        program = _built(rival.plan, net, settings, contest.stage)
        if program is not None:
            programs[name] = program
    if not programs:
        return built
    try:
        with phase("check", contest.stage):
            times = _times(built, programs, check, contest.limits(limits(), settings), timer)
            best = min(programs, key=lambda name: times[name].median_ms if name in times else float("inf"))
            outcome = None
            if best in times and contest.wins(by_name[best], times[best], times[_PLAN], settings):
                outcome = check.both(programs[best], limits())
    except _FAILURES:  # the selected plan is there: what fails beside it is no rival
        torch.cuda.empty_cache()
        return built
    told = ", ".join(f"{name} {one.median_ms:.3f}" for name, one in times.items() if name != _PLAN)
    note = f"{contest.what}, ms: {told}; as selected {times[_PLAN].median_ms:.3f}"
    least = least_error(str(settings.numerics), net.captured.graph)
    if outcome is None or end_to_end.why_wrong("the outputs'", outcome.errors, outcome.baseline_errors, least):
        plan = replace(built.plan, notes=(*built.plan.notes, note))
        return replace(built, plan=plan, program=built.program.with_plan(plan))
    program = programs[best]
    plan = replace(program.plan, notes=(*built.plan.notes, f"{note}: {best} runs"))
    strategies = compared(built.choice, net, settings)  # of the net's parts, which the rival's choice does not have
    choice = replace(
        by_name[best].choice, strategies=strategies.strategies, predicted=strategies.predicted, left_out=()
    )
    return replace(built, choice=choice, plan=plan, program=program.with_plan(plan), outcome=outcome)


def _rounds(limits: TimingLimits, settings: Settings) -> TimingLimits:
    """Effort `none` takes the first rounds' word."""
    return replace(limits, rounds=min(limits.rounds, FIRST_ROUNDS)) if settings.effort is Effort.NONE else limits


@dataclass(frozen=True, slots=True)
class Contest:
    """How rivals meet the selected plan.

    Attributes:
        what: a name for the rivals in the note.
        stage: a name for the profile.
        limits: how long they are timed, from how long programs are.
        wins: whether a rival's time replaces the plan's.
    """

    what: str
    stage: str
    limits: Callable[[TimingLimits, Settings], TimingLimits]
    wins: Callable[[Rival, Latency, Latency, Settings], bool]


WHOLE: Final = Contest("the whole net by one engine", "net as one program", _rounds, _wins)

_PLAN: Final = "as selected"


def _times(
    built: BuiltPlan, programs: dict[str, Program], check: EndToEndCheck, limits: TimingLimits, timer: Timer
) -> dict[str, Latency]:
    """Times of the plan and of the programs in turn; those that are clearly slower have few rounds."""
    with check.context():
        runs = {_PLAN: check.ours(built.program).run}
        runs |= {name: check.ours(program).run for name, program in programs.items()}
        times = timer(runs, cuda=check.cuda, rounds=min(FIRST_ROUNDS, limits.rounds), most_s=limits.most_s)
        close = {
            name: run
            for name, run in runs.items()
            if name == _PLAN or times[name].median_ms < CLOSE * times[_PLAN].median_ms
        }
        if len(close) > 1 and limits.rounds > FIRST_ROUNDS:
            times |= timer(close, cuda=check.cuda, rounds=limits.rounds, most_s=limits.most_s)
        return times


def _built(plan: Plan, net: Net, settings: Settings, stage: str) -> Program | None:
    """A plan's program; None if it cannot be compiled, or captured."""
    try:
        with phase("build", stage):
            return build_program(plan, net.captured, net.regions_by_nodes, net.target, settings, tuned=True)
    except _FAILURES:
        torch.cuda.empty_cache()
        return None
