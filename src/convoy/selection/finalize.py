"""Turns chosen candidates into a Selection: launch order, conversions, total time and peak memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.errors import SelectionError
from convoy.selection.order import LaunchOrder
from convoy.selection.problem import Candidate, Conversion, Selection, SelectionProblem


@dataclass(slots=True)
class LiveValue:
    """A value in one memory format, as it was made or as a converted copy, with its lifetime.

    Attributes:
        value: name of the value.
        layout: its memory format; `any` if it is not 4-D.
        source: memory format that it is copied from; empty if it is as it was made.
        first: index of the launch that makes it, or before which it is copied; -1 for an input of the graph.
        last: index of the last launch for which it must exist; the number of launches if it is returned.
    """

    value: str
    layout: str
    source: str
    first: int
    last: int


def finalize_selection(
    problem: SelectionProblem, order: LaunchOrder, solver: str, chosen: Sequence[Candidate], bound_us: float = 0.0
) -> Selection:
    """The order, conversions, time and memory of a choice.

    Args:
        problem: the selection problem.
        order: its launch order.
        solver: the solver's name.
        chosen: one candidate for each region of a cover, in any order.
        bound_us: a proven lower bound on the time of any choice, microseconds.

    Raises:
        SelectionError: the choice covers a node twice or not at all, hides a value that is read, cannot be ordered, or needs
            an impossible conversion.
    """
    _cover_once(problem, chosen)
    by_region = {c.region: c for c in chosen}
    launched = [by_region[index] for index in order.sort(sorted(by_region))]
    if len(launched) < len(chosen):
        raise SelectionError("the chosen regions depend on each other in a cycle")
    live = live_values(problem, launched)
    copied = sorted((f for f in live if f.source), key=lambda f: f.first)
    conversions = [_conversion(problem, f.value, f.source, f.layout) for f in copied]
    total = math.fsum([*(c.median_us for c in launched), *(c.median_us for c in conversions)])
    return Selection(
        solver=solver,
        chosen=tuple(launched),
        conversions=tuple(conversions),
        total_us=total,
        bound_us=min(bound_us, total),
        peak_bytes=max(memory_profile(problem, launched, live)),
    )


def _conversion(problem: SelectionProblem, value: str, source: str, layout: str) -> Conversion:
    copy = problem.copies.get((value, source, layout))
    predicted = copy is not None and copy.predicted
    return Conversion(value, source, layout, problem.convert_us[value, source, layout], predicted)


def live_values(problem: SelectionProblem, launched: Sequence[Candidate]) -> list[LiveValue]:
    """Every value that a choice makes, and every copy that it needs, with their lifetimes.

    A conversion belongs to the launch that follows it, so its source lives until that launch is over; conversions of outputs
    follow the last launch. A conversion is made once for all readers, from the format in which the value was made.

    Raises:
        SelectionError: a value that is read is hidden inside a region, or a conversion is impossible.
    """
    native: dict[str, LiveValue] = {
        v: LiveValue(v, problem.border_layout(v), "", -1, len(launched)) for v in dict.fromkeys(problem.inputs)
    }
    copies: dict[tuple[str, str], LiveValue] = {}
    for index, candidate in enumerate(launched):
        region = problem.regions[candidate.region]
        for value in region.args:
            _use(problem, native, copies, value, problem.layout_of(value, candidate.layout), index)
        for value in region.results:
            native[value] = LiveValue(value, problem.layout_of(value, candidate.layout), "", index, index)
    for value in problem.outputs:
        _use(problem, native, copies, value, problem.border_layout(value), len(launched))
    return [*native.values(), *copies.values()]


def memory_profile(problem: SelectionProblem, launched: Sequence[Candidate], live: Sequence[LiveValue]) -> list[int]:
    """Bytes in use during each launch and, last, when the net returns: live values, workspace, packed constants.

    Inputs belong to the caller and exist all the time.
    """
    steps = len(launched) + 1
    change = [0] * (steps + 1)
    for one in live:
        change[max(one.first, 0)] += problem.value_bytes[one.value]
        change[one.last + 1] -= problem.value_bytes[one.value]
    resident = sum(c.resident_bytes for c in launched)
    profile: list[int] = []
    used = 0
    for index in range(steps):
        used += change[index]
        profile.append(used + resident + (launched[index].workspace_bytes if index < len(launched) else 0))
    return profile


def _use(
    problem: SelectionProblem,
    native: dict[str, LiveValue],
    copies: dict[tuple[str, str], LiveValue],
    value: str,
    layout: str,
    index: int,
) -> None:
    made = native.get(value)
    if made is None:
        raise SelectionError(f"value {value!r} is read, but the chosen regions keep it inside one of them")
    if layout == made.layout:
        made.last = max(made.last, index)
        return
    if (value, layout) not in copies:
        if (value, made.layout, layout) not in problem.convert_us:
            raise SelectionError(f"value {value!r} cannot be converted from {made.layout} to {layout}")
        copies[value, layout] = LiveValue(value, layout, made.layout, index, index)
        made.last = max(made.last, index)
    copies[value, layout].last = index


def _cover_once(problem: SelectionProblem, chosen: Sequence[Candidate]) -> None:
    left = set(problem.nodes)
    for candidate in chosen:
        for node in problem.regions[candidate.region].nodes:
            if node not in left:
                raise SelectionError(f"node {node!r} is covered twice")
            left.remove(node)
    if left:
        raise SelectionError(f"node {min(left)!r} is not covered")
