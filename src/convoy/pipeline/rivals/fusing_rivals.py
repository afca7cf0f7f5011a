"""Other selections beside the selected plan on a CPU: with more layers in one launch, and with fewer.

Whether two layers are faster in one launch than in two follows from times that were measured seconds apart, and a shared machine
may run at half its speed for seconds. So the selection is also made as if such launches were faster, and as if they were
slower, than measured. Where these selections differ, their programs are timed in turn, and the fastest is used. Besides, a launch
by itself is measured with its inputs in the caches, where a net's other layers have left little: one launch less saves more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from convoy.engines.manifest import load_engine
from convoy.errors import SelectionError
from convoy.pipeline.check.end_to_end import Latency, TimingLimits
from convoy.pipeline.check.verify_predicted import BuiltPlan
from convoy.pipeline.launch_overhead import with_launch_costs, without_launch_costs
from convoy.pipeline.net import Net
from convoy.pipeline.rivals.whole_rivals import Contest, Rival
from convoy.pipeline.select import Choice, make_plan
from convoy.selection import Candidate, Selection, SelectionProblem, solve
from convoy.settings import Effort, Settings, Solver
from convoy.tune import SearchResult

FACTORS: Final = {"more layers in one launch": 0.6, "fewer layers in one launch": 1 / 0.6}
"""Factors on the times of launches of several layers. On a shared machine the times of EfficientNet-B0's layers changed by up to
1.8 between two minutes. A factor of 0.85 changed few of its launches, and none of those that pay in MobileNetV2."""

TIED: Final = 0.01
"""By less than this share of its time a selection is not faster: the first one stays."""

ROUNDS: Final = 45
"""Rounds of timing: three times the usual, because selections differ by some percent."""

MOST_S: Final = 4.0
"""Seconds of timing at most, but for the rounds that a median needs."""

PATTERNS: Final = ("banded", "fused")
"""Of regions with several layers in one launch of a kernel in C."""


def fusing_rivals(net: Net, found: SearchResult, built: BuiltPlan, settings: Settings) -> list[Rival]:
    """The plans of the other selections that differ from a selected one, and from each other.

    Args:
        net: the net.
        found: measured times.
        built: the selected plan.
        settings: whose solver must be the exact one, and whose effort must allow measuring.
    """
    if net.target.device != "cpu" or built.wrong or settings.solver is not Solver.EXACT:
        return []
    if settings.effort is Effort.NONE or len(built.choice.problem.regions) != len(net.regions):
        return []
    seen = [_configs(built.choice.selection)]
    rivals: list[Rival] = []
    for label, factor in FACTORS.items():
        choice = _chosen_with(built.choice, factor, settings)
        if choice is not None and _configs(choice.selection) not in seen:
            seen.append(_configs(choice.selection))
            rivals.append(Rival(choice, make_plan(net, choice, settings, (), found), label))
    return rivals


def wins(rival: Rival, timed: Latency, plan: Latency, settings: Settings) -> bool:
    """Whether a selection takes less time in the median of rounds that are compared one by one."""
    del rival, settings
    pairs = zip(timed.samples_ms, plan.samples_ms, strict=False)
    return statistics.median(ours / theirs for ours, theirs in pairs) < 1 - TIED


def _limits(limits: TimingLimits, settings: Settings) -> TimingLimits:
    del settings
    return replace(limits, rounds=ROUNDS, most_s=min(limits.most_s, MOST_S))


FUSING: Final = Contest("other selections", "other selections", _limits, wins)


def _configs(selection: Selection) -> set[tuple[int, str, str]]:
    return {(one.region, one.problem, str(one.config)) for one in selection.chosen}


def _chosen_with(choice: Choice, factor: float, settings: Settings) -> Choice | None:
    """The selection with other times for launches of several layers; None where nothing is left to choose from."""
    problem = with_launch_costs(choice.problem, "cpu", settings.engines)
    running = {one.config.engine for one in choice.selection.chosen}
    offered = tuple(_scaled(problem, _quick_or_running(problem.candidates, running, settings), factor))
    try:
        selection = solve(replace(problem, candidates=offered), str(settings.solver))
    except SelectionError:
        return None
    measured = without_launch_costs(selection, choice.problem, "cpu")
    costs = {(one.region, one.problem, one.config): one.median_us for one in reversed(problem.candidates)}
    added = math.fsum(costs[one.region, one.problem, one.config] - one.median_us for one in selection.chosen)
    total_us = selection.total_us + added
    return replace(choice, selection=replace(measured, total_us=total_us, bound_us=choice.selection.bound_us))


def _quick_or_running(candidates: Iterable[Candidate], running: set[str], settings: Settings) -> Iterator[Candidate]:
    """Without those that take a compiler to start, unless the selected plan has such."""
    for one in candidates:
        if one.config.engine in running or load_engine(one.config.engine, settings.engines).starts_quickly:
            yield one


def _scaled(problem: SelectionProblem, candidates: Iterable[Candidate], factor: float) -> Iterator[Candidate]:
    for one in candidates:
        together = problem.regions[one.region].pattern in PATTERNS
        yield replace(one, median_us=one.median_us * factor) if together else one
