"""Steps off the critical path in configs that take less of the device: a slower config with fewer blocks may be better there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from convoy.plan.plan import Step
from convoy.schedule.dag import dag_of
from convoy.selection import Candidate, SelectionProblem

MAX_SLOWDOWN: Final = 1.5
"""Times the chosen config's time that another config may take: a slower one is seldom hidden beside the critical path."""

MAX_WORK_RATIO: Final = 0.85
"""Share of the chosen config's work (time times share of the device) that another config must stay under to replace it."""


def alternative_steps(steps: Sequence[Step], problem: SelectionProblem, count: int = 2) -> list[tuple[Step, ...]]:
    """The same steps with each region in its second-best config, then in its third-best; a step without one stays.

    Args:
        steps: in the order of a plan.
        problem: the selection problem with all candidates.
        count: most such variants.
    """
    offered: dict[tuple[str, str, str], list[Candidate]] = {}
    for candidate in sorted(problem.candidates, key=lambda one: one.median_us):
        key = problem.regions[candidate.region].id, candidate.problem, candidate.layout
        offered.setdefault(key, []).append(candidate)
    found: list[tuple[Step, ...]] = []
    for place in range(count):
        variant = tuple(_another(step, offered, place) for step in steps)
        if variant != tuple(steps):
            found.append(variant)
    return found


def _another(step: Step, offered: Mapping[tuple[str, str, str], Sequence[Candidate]], place: int) -> Step:
    if step.kind != "region" or not step.median_us:
        return step
    name = f"{step.pattern}({'+'.join(step.nodes)})"
    near = [
        one
        for one in offered.get((name, step.problem, step.layout), ())
        if one.config != step.config and 0 < one.median_us <= MAX_SLOWDOWN * step.median_us
    ]
    if place >= len(near):
        return step
    one = near[place]
    return replace(
        step,
        config=one.config,
        median_us=one.median_us,
        workspace_bytes=one.workspace_bytes,
        predicted=one.predicted,
    )


def use_smaller_configs(
    steps: Sequence[Step], shares: Sequence[float], variants: Sequence[tuple[Sequence[Step], Sequence[float]]]
) -> tuple[tuple[Step, ...], tuple[float, ...]]:
    """Steps with those off the critical path in the config that takes the least of the device, and their shares.

    Args:
        steps: as chosen.
        shares: share of the device that each takes.
        variants: the same steps in other configs, with their shares.
    """
    critical = set(dag_of(steps, [step.median_us for step in steps]).critical_path())
    made: list[Step] = []
    taken: list[float] = []
    for index, (step, share) in enumerate(zip(steps, shares, strict=True)):
        forms = [(step, share), *((other[index], theirs[index]) for other, theirs in variants)]
        work = [one.median_us * part for one, part in forms]
        best = min(range(len(forms)), key=lambda form: work[form])
        keep = index in critical or not forms[best][1] or work[best] > MAX_WORK_RATIO * work[0]
        made.append(forms[0 if keep else best][0])
        taken.append(forms[0 if keep else best][1])
    return tuple(made), tuple(taken)
