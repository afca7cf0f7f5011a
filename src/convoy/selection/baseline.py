"""The baseline: every node by itself, in the memory format in which PyTorch would have it."""

from __future__ import annotations

import math

from convoy.errors import SelectionError
from convoy.selection.cover import cover_in_order, node_shares
from convoy.selection.eligible import layout_compatible
from convoy.selection.finalize import finalize_selection
from convoy.selection.order import LaunchOrder
from convoy.selection.problem import Candidate, Selection, SelectionProblem


def solve(problem: SelectionProblem, *, engine: str = "", time_limit_s: float = math.inf) -> Selection:
    """Choose only baseline candidates, in the first memory format of `value_layouts`, of the smallest regions.

    Args:
        problem: a valid problem.
        engine: not used.
        time_limit_s: not used.

    Raises:
        SelectionError: a node has no baseline candidate, or the net does not fit the memory budget.
    """
    del engine, time_limit_s
    pool = [c for c in problem.candidates if c.baseline and _as_torch(problem, c)]
    chosen = cover_in_order(problem, pool, lambda c: (len(problem.regions[c.region].nodes), c.median_us))
    bound_us = math.fsum(node_shares(problem, layout_compatible(problem)).values())
    selection = finalize_selection(problem, LaunchOrder(problem), "baseline", chosen, bound_us)
    check_budget(problem, selection)
    return selection


def _as_torch(problem: SelectionProblem, candidate: Candidate) -> bool:
    region = problem.regions[candidate.region]
    return all(
        problem.layout_of(value, candidate.layout) == problem.value_layouts[value][0]
        for value in (*region.args, *region.results)
        if value in problem.value_layouts
    )


def check_budget(problem: SelectionProblem, selection: Selection) -> None:
    """Refuse a selection that needs more memory than the budget.

    Raises:
        SelectionError: naming both.
    """
    budget = problem.memory_budget_bytes
    if budget is not None and selection.peak_bytes > budget:
        raise SelectionError(
            f"{selection.solver} needs {selection.peak_bytes} bytes; `memory_budget_bytes` is {budget} bytes. "
            "Solver 'exact' finds the least sufficient budget."
        )
