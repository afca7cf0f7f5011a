"""One engine for the whole net, as a comparison for choosing per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from convoy.errors import InputError, SelectionError
from convoy.selection.baseline import check_budget
from convoy.selection.cover import cover_in_order, node_shares, node_times
from convoy.selection.eligible import layout_compatible
from convoy.selection.finalize import finalize_selection
from convoy.selection.order import LaunchOrder
from convoy.selection.problem import Candidate, Selection, SelectionProblem


def solve(problem: SelectionProblem, *, engine: str = "", time_limit_s: float = math.inf) -> Selection:
    """Choose one engine wherever it has a candidate, the baseline elsewhere.

    This is done once for each memory format, with candidates in that format where they exist, and the fastest net is
    returned: an engine that works in NHWC need not convert at every layer. Here a challenger need not beat the baseline.

    Args:
        problem: a valid problem.
        engine: the engine's id; empty: each engine in turn, and the fastest net of all.
        time_limit_s: not used.

    Raises:
        InputError: no candidate is of that engine.
        SelectionError: no cover was found, or none that fits the memory budget.
    """
    del time_limit_s
    pool = layout_compatible(problem)
    known = list(dict.fromkeys(c.config.engine for c in pool))
    if engine and engine not in known:
        raise InputError("solver", f"single:{engine}", "an engine with a candidate: " + ", ".join(known))
    found: list[Selection] = []
    refused: list[SelectionError] = []
    order = LaunchOrder(problem)
    bound_us, alone = math.fsum(node_shares(problem, pool).values()), node_times(problem, pool)
    layouts = list(dict.fromkeys(c.layout for c in problem.candidates))
    for name in [engine] if engine else known:
        for layout in layouts:
            try:
                found.append(_in_layout(problem, order, pool, alone, bound_us, name, layout))
            except SelectionError as error:
                refused.append(error)
    if not found and refused:
        raise refused[0]
    if not found:  # no candidates: a net without nodes
        return finalize_selection(problem, order, "single", ())
    return min(found, key=lambda s: s.total_us)


def _in_layout(
    problem: SelectionProblem,
    order: LaunchOrder,
    pool: Sequence[Candidate],
    alone: Mapping[str, float],
    bound_us: float,
    engine: str,
    layout: str,
) -> Selection:
    taken = [c for c in pool if c.config.engine == engine]
    rest = [c for c in pool if c.baseline and c.config.engine != engine]

    def preference(c: Candidate) -> tuple[float, ...]:
        nodes = problem.regions[c.region].nodes
        covered_us = math.fsum(alone[node] for node in nodes)
        ratio = c.median_us / covered_us if covered_us > 0 else 0.0
        return (c.config.engine != engine, not _wanted(problem, c, layout), ratio, c.region, c.median_us)

    chosen = cover_in_order(problem, [*taken, *rest], preference)
    selection = finalize_selection(problem, order, f"single:{engine}", chosen, bound_us)
    check_budget(problem, selection)
    return selection


def _wanted(problem: SelectionProblem, candidate: Candidate, layout: str) -> bool:
    region = problem.regions[candidate.region]
    formed = any(v in problem.value_layouts for v in (*region.args, *region.results))
    return candidate.layout == layout or not formed
