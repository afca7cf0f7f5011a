"""The choice: cover the graph with candidates at least total time. No torch here."""

from __future__ import annotations

from convoy.errors import InputError
from convoy.selection.exact import exact, single
from convoy.selection.greedy import baseline, greedy
from convoy.selection.problem import Candidate, Conversion, Copy, Cover, Selection, SelectionProblem
from convoy.selection.validate import validate

__all__ = ["Candidate", "Conversion", "Copy", "Cover", "Selection", "SelectionProblem", "solve"]


def solve(problem: SelectionProblem, solver: str = "exact", time_limit_s: float = 20.0) -> Selection:
    """Choose one candidate for each region of a cover.

    Args:
        problem: what is on offer.
        solver: `exact`, `greedy`, `baseline` or `single:ENGINE_ID`.
        time_limit_s: for the exact solver.

    Raises:
        InputError: an unknown solver, or a problem that contradicts itself.
        SelectionError: no choice satisfies the constraints.
    """
    validate(problem)
    if solver == "exact":
        return exact(problem, time_limit_s)
    if solver == "greedy":
        return greedy(problem)
    if solver == "baseline":
        return baseline(problem)
    if solver.startswith("single:"):
        return single(problem, solver.removeprefix("single:"), time_limit_s)
    raise InputError("solver", solver, "exact, greedy, baseline or single:ENGINE_ID")
