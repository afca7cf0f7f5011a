"""The best candidate per layer: every region its fastest, regardless of its neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from convoy.errors import SelectionError
from convoy.selection.cover import cover_in_order, node_shares, node_times
from convoy.selection.eligible import undominated
from convoy.selection.finalize import finalize_selection, live_values, memory_profile
from convoy.selection.order import LaunchOrder
from convoy.selection.problem import Candidate, Selection, SelectionProblem


def solve(problem: SelectionProblem, *, engine: str = "", time_limit_s: float = math.inf) -> Selection:
    """Choose layer by layer: one implementation per layer, with fusion.

    The nodes are visited in graph order. Each uncovered node gets the region with the least time relative to its nodes' own
    times in the baseline, and that region its fastest candidate. Conversions between memory formats are ignored while
    choosing, but counted in `total_us`. If the result exceeds the memory budget, the launch at the peak takes its next best
    candidate, until it fits.

    Args:
        problem: a valid problem.
        engine: not used.
        time_limit_s: not used; it takes milliseconds.

    Raises:
        SelectionError: no cover was found, or none that fits the budget.
    """
    del engine, time_limit_s
    order = LaunchOrder(problem)
    pool = undominated(problem)
    bound_us = math.fsum(node_shares(problem, pool).values())
    alone = node_times(problem, pool)
    while True:
        selection = finalize_selection(problem, order, "greedy", _cover(problem, pool, alone), bound_us)
        budget = problem.memory_budget_bytes
        if budget is None or selection.peak_bytes <= budget:
            return selection
        dropped = _largest_at_peak(problem, selection)
        pool = [c for c in pool if c is not dropped]


def _cover(problem: SelectionProblem, pool: Sequence[Candidate], alone: dict[str, float]) -> list[Candidate]:
    fastest: dict[int, float] = {}
    for candidate in pool:
        fastest[candidate.region] = min(fastest.get(candidate.region, math.inf), candidate.median_us)
    ratios: dict[int, float] = {}
    for region, time_us in fastest.items():
        covered_us = math.fsum(alone[node] for node in problem.regions[region].nodes)
        ratios[region] = time_us / covered_us if covered_us > 0 else (math.inf if time_us > 0 else 0.0)
    return cover_in_order(problem, pool, lambda c: (ratios[c.region], c.region, c.median_us))


def _largest_at_peak(problem: SelectionProblem, selection: Selection) -> Candidate:
    """The candidate whose removal lowers the peak most: the launch at the peak by workspace, or the largest constants."""
    profile = memory_profile(problem, selection.chosen, live_values(problem, selection.chosen))
    peak = profile.index(max(profile))
    workspace = selection.chosen[peak].workspace_bytes if peak < len(selection.chosen) else 0
    largest = max(selection.chosen, key=lambda c: c.resident_bytes, default=None)
    if workspace and (largest is None or workspace >= largest.resident_bytes):
        return selection.chosen[peak]
    if largest is not None and largest.resident_bytes:
        return largest
    raise SelectionError(
        f"the best candidates need {selection.peak_bytes} bytes, and no smaller candidate is left; "
        f"`memory_budget_bytes` is {problem.memory_budget_bytes} bytes. Solver 'exact' finds the least sufficient budget."
    )
