"""The optimum: an integer program over regions, candidates, memory formats and memory, solved by HiGHS."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.errors import InternalError, SelectionError
from convoy.selection import greedy, highs
from convoy.selection.budget import MemoryModel
from convoy.selection.covering import CoverProgram, formulate
from convoy.selection.eligible import undominated
from convoy.selection.finalize import finalize_selection, live_values, memory_profile
from convoy.selection.linear import Terms, plus
from convoy.selection.order import LaunchOrder
from convoy.selection.problem import Selection, SelectionProblem

_BOUND_TOLERANCE = 1e-6
"""HiGHS's own tolerance: a bound this close to the total, relatively, equals it."""

_ROWS_PER_ROUND = 8
"""Places that get a memory row at a time, the fullest first. Each adds columns for every value alive there, and most never
matter; with few, the program is solved more often. DenseNet-201 with five draws of times (`bench/tuning/selection.py`), under a
budget: 70 s in all with one at a time, 49 s with four, 36 s with eight, 42 s with sixteen, 61 s with all."""


def solve(problem: SelectionProblem, *, engine: str = "", time_limit_s: float = math.inf) -> Selection:
    """Choose the candidates of least total time, conversions included, that fit the memory budget.

    The program is described at `covering.formulate` and `budget.MemoryModel`; the candidates are those of
    `eligible.undominated`. Layout selection with conversion costs follows Anderson and Gregg (CGO 2018), here with
    overlapping regions, conversions shared by all readers, and memory. Two kinds of rows are added only when a solution
    breaks them: regions that depend on each other in a cycle, and the memory in use at a place. (If proposals depend on each
    other so that no launch order holds for all covers, a choice above the budget may be excluded by itself.)

    The same problem gives the same choice: HiGHS runs on one thread with a fixed seed, and equal candidates of one region
    keep their order. A run that `time_limit_s` stops returns its best choice, with `bound_us` below `total_us`.

    Args:
        problem: a valid problem.
        engine: not used.
        time_limit_s: stop then, with the best choice found so far.

    Raises:
        InputError: the package highspy is missing.
        InternalError: HiGHS's answer cannot be right; the message names its version.
        SelectionError: no choice satisfies the constraints (the message names the least sufficient budget), or none was found
            in time.
    """
    del engine
    order = LaunchOrder(problem)
    deadline = time.monotonic() + time_limit_s
    model = formulate(problem, undominated(problem))
    budget = problem.memory_budget_bytes
    memory = None if budget is None else MemoryModel(model, order)
    if memory is not None and budget is not None and memory.least_bytes() > budget:
        raise _refusal(problem, time_limit_s)
    held: set[int] = set()
    start = _start(problem)
    bound_us = 0.0
    while True:
        try:
            answer = _minimise(model, deadline, start)
        except highs.OutOfTimeError:
            if start is None and budget is None:
                raise
            if start is None:
                raise _refusal(problem, time_limit_s, proven=False) from None
            return replace(start, solver="exact", bound_us=min(bound_us, start.total_us))
        if start is not None and (wrong := _contradicted(answer, start)):
            raise wrong
        if answer is None:
            raise _refusal(problem, time_limit_s)
        bound_us = max(bound_us, answer.bound_us)
        if _cut_cycle(model, order, answer.columns):
            continue
        selection = finalize_selection(
            problem, order, "exact", [model.pool[i] for i in answer.columns], answer.bound_us
        )
        if memory is None or budget is None or selection.peak_bytes <= budget:
            return _tight(selection)
        over_limit = _places_over_limit(model, memory, answer.columns, selection, budget, held)
        _keep_within(model, memory, over_limit, budget)
        if not over_limit:
            model.program.at_most(plus(answer.columns), len(answer.columns) - 1)


def minimum_memory(problem: SelectionProblem, *, time_limit_s: float = math.inf) -> Selection:
    """Choose the candidates that need the least memory, at any time: `peak_bytes` is the least sufficient budget.

    If proposals depend on each other in a cycle, covers that contradict `LaunchOrder.places` are left out.

    Args:
        problem: a valid problem; its own budget is ignored, but slow candidates with little memory are included.
        time_limit_s: stop then, with the best choice found so far.

    Raises:
        InputError: the package highspy is missing.
        InternalError: as for `solve`.
        SelectionError: no choice satisfies the constraints, or none was found in time.
    """
    order = LaunchOrder(problem)
    deadline = time.monotonic() + time_limit_s
    model = formulate(problem, undominated(problem, budgeted=True))
    model.program.cost = [0.0] * len(model.program.cost)
    memory = MemoryModel(model, order)
    model.program.at_most(plus(memory.contradictions), 0.0)
    scale = float(max(1, *problem.value_bytes.values(), *(c.workspace_bytes for c in model.pool)))
    peak = model.program.continuous(cost=1.0)
    held: set[int] = set()
    start = _start(replace(problem, memory_budget_bytes=None))
    best = start
    while True:
        try:
            answer = _minimise(model, deadline, start)
        except highs.OutOfTimeError:
            if best is None:
                raise
            return best
        if answer is None and start is not None and not order.contradictions:
            raise highs.invalid_answer("found no choice where there is one")
        if answer is None:
            raise SelectionError(_NO_COVER)
        if _cut_cycle(model, order, answer.columns):
            continue
        selection = finalize_selection(problem, order, "exact", [model.pool[i] for i in answer.columns])
        best = selection if best is None or selection.peak_bytes < best.peak_bytes else best
        limit = answer.bound_us * scale * (1 + _BOUND_TOLERANCE)
        over_limit = _places_over_limit(model, memory, answer.columns, selection, limit, held)
        if not over_limit:
            return best
        for place in over_limit:
            usage = memory.usage(place)
            scaled = [(column, size / scale) for column, size in usage.terms]
            model.program.at_most([*scaled, (peak, -1.0)], -usage.fixed_bytes / scale)


def _places_over_limit(
    model: CoverProgram,
    memory: MemoryModel,
    columns: Sequence[int],
    selection: Selection,
    limit_bytes: float,
    held: set[int],
) -> list[int]:
    """Places at which a selection uses more than `limit_bytes`, some of those not in `held`, to which they are added."""
    column_of = {id(model.pool[i]): i for i in columns}
    profile = memory_profile(model.problem, selection.chosen, live_values(model.problem, selection.chosen))
    places = memory.over_limit([column_of[id(c)] for c in selection.chosen], profile, limit_bytes)
    found = [place for place in places if place not in held][:_ROWS_PER_ROUND]
    held.update(found)
    return found


def _keep_within(model: CoverProgram, memory: MemoryModel, places: Sequence[int], budget_bytes: int) -> None:
    """Rows that limit the memory in use at some places, except for choices that contradict `LaunchOrder.places`."""
    for place in places:
        usage = memory.usage(place)
        terms = usage.terms + plus(memory.contradictions, -float(usage.most_bytes))
        scaled = [(column, size / budget_bytes) for column, size in terms]
        model.program.at_most(scaled, (budget_bytes - usage.fixed_bytes) / budget_bytes)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Columns of the chosen candidates, and the proven lower bound on the objective."""

    columns: list[int]
    bound_us: float


_NO_COVER = "no choice of candidates covers the graph: a value would need a conversion that does not exist"


def _minimise(model: CoverProgram, deadline: float, start: Selection | None) -> _Answer | None:
    """Solve the program as it is; None if it has no solution."""
    begin = {id(c) for c in start.chosen} if start is not None else set[int]()
    known = {i: float(id(c) in begin) for i, c in enumerate(model.pool)} if begin <= {id(c) for c in model.pool} else {}
    optimum = highs.minimise(model.program, known if begin else {}, deadline)
    if optimum is None:
        return None
    return _Answer([i for i in range(len(model.pool)) if optimum.values[i] > 0.5], optimum.bound)


def _contradicted(answer: _Answer | None, start: Selection) -> InternalError | None:
    """The error to raise if the solver excludes a known choice."""
    if answer is None:
        return highs.invalid_answer("found no choice where there is one")
    if answer.bound_us > start.total_us + _BOUND_TOLERANCE * max(1.0, start.total_us):
        return highs.invalid_answer(
            f"found no choice under {answer.bound_us:g} us where one takes {start.total_us:g} us"
        )
    return None


def _start(problem: SelectionProblem) -> Selection | None:
    """The greedy choice as HiGHS's starting point, so that there is an answer when time runs out; None if it fails."""
    try:
        return greedy.solve(problem)
    except SelectionError:
        return None


def _cut_cycle(model: CoverProgram, order: LaunchOrder, columns: Sequence[int]) -> bool:
    """Forbid regions that depend on each other in a cycle from being chosen together; False if there are none."""
    cycle = set(order.cycle(sorted(model.pool[i].region for i in columns)))
    if cycle:
        terms: Terms = plus(i for i, c in enumerate(model.pool) if c.region in cycle)
        model.program.at_most(terms, len(cycle) - 1)
    return bool(cycle)


def _tight(selection: Selection) -> Selection:
    if selection.total_us - selection.bound_us <= _BOUND_TOLERANCE * max(1.0, selection.total_us):
        return replace(selection, bound_us=selection.total_us)
    return selection


def _refusal(problem: SelectionProblem, time_limit_s: float, *, proven: bool = True) -> SelectionError:
    if problem.memory_budget_bytes is None:
        return SelectionError(_NO_COVER)
    least = minimum_memory(problem, time_limit_s=time_limit_s).peak_bytes
    wanted = f"{least} bytes" + (f" ({math.ceil(least / (1 << 20))} MiB)" if least > 1 << 20 else "")
    given = f"memory_budget_bytes: {problem.memory_budget_bytes} bytes are too few for any choice"
    if proven:
        return SelectionError(f"{given}; at least {wanted} are needed")
    return SelectionError(f"{given} that was found in {time_limit_s:g} s; {wanted} would do")
