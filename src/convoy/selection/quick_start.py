"""Ties go to engines that start quickly: a choice whose executables load at once, where it takes no longer."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from convoy.errors import SelectionError
from convoy.selection.problem import Selection, SelectionProblem, covered_nodes
from convoy.selection.solve import solve

TIE: Final = 0.02
"""Share of a candidate's time up to which another counts as equally fast, where the candidate's spread is smaller than that."""


def prefer_quick_start(
    problem: SelectionProblem, chosen: Selection, slow: Collection[str], *, net_share: float = 0.0
) -> Selection:
    """The best choice without engines that start slowly, if it is equally fast; else the choice itself.

    A program with a single executable that a compiler must load takes seconds to start, so all of them go or none. The other
    choice may take longer by the spread, or by `TIE`, of each candidate that goes. Its bound is that of the first choice.

    Args:
        problem: the problem.
        chosen: its solution by `exact` or `greedy`.
        slow: ids of the engines whose executables take seconds to load (`Engine.starts_quickly` is False).
        net_share: share of the whole time that the other choice may take longer, if that is more.

    Raises:
        InputError: as `solve`.
    """
    leaving = [candidate for candidate in chosen.chosen if candidate.config.engine in slow]
    if not leaving:
        return chosen
    margin_us = math.fsum(max(candidate.spread_us, TIE * candidate.median_us) for candidate in leaving)
    kept = tuple(candidate for candidate in problem.candidates if candidate.config.engine not in slow)
    if not covered_nodes(problem, kept).issuperset(problem.nodes):
        return chosen
    try:
        other = solve(replace(problem, candidates=kept), chosen.solver)
    except SelectionError:  # the memory budget rules the other choice out
        return chosen
    if other.total_us > chosen.total_us + max(margin_us, net_share * chosen.total_us):
        return chosen
    return replace(other, bound_us=min(chosen.bound_us, other.total_us))
