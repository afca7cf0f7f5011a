"""`solve`: one way into every solver."""

from __future__ import annotations

from typing import Final, Protocol

from convoy.errors import InputError
from convoy.selection import baseline, exact, greedy, single
from convoy.selection.problem import Selection, SelectionProblem
from convoy.selection.validate import validate

TIME_LIMIT_S: Final = 60.0
"""Time that `exact` may take. DenseNet-201 with 8 candidates a node takes well under 2 s; under a memory budget it takes some
seconds, and once took 45 (bench/tuning/selection.py)."""


class _Solver(Protocol):
    def __call__(self, problem: SelectionProblem, *, engine: str, time_limit_s: float) -> Selection: ...


SOLVERS: Final[dict[str, _Solver]] = {
    "exact": exact.solve,
    "greedy": greedy.solve,
    "single": single.solve,
    "baseline": baseline.solve,
}
"""Solver by name; `single` may be followed by a colon and an engine's id."""


def solve(problem: SelectionProblem, solver: str = "exact", time_limit_s: float = TIME_LIMIT_S) -> Selection:
    """Cover the graph with candidates: one for each region of a cover, and the conversions that they need.

    Args:
        problem: what is on offer.
        solver: `exact` (the optimum, with its bound), `greedy` (best per layer), `single:ENGINE` (one engine wherever it
            has a candidate, the baseline elsewhere), `single` (the best of those), or `baseline` (what PyTorch does).
        time_limit_s: time that `exact` may take, seconds; when it is over, the best choice so far is returned.

    Raises:
        InputError: an unknown solver or engine, or a solver whose package is missing.
        InternalError: a problem that contradicts itself, or an answer of HiGHS that cannot be right.
        SelectionError: no choice satisfies the constraints; where only the memory budget is in the way, `exact` says the
            least that would do.
    """
    name, colon, engine = solver.partition(":")
    if name not in SOLVERS or (colon and (name != "single" or not engine)):
        raise InputError("solver", solver, "exact, greedy, single, single:ENGINE or baseline")
    if not time_limit_s > 0:
        raise InputError("time_limit_s", time_limit_s, "a positive number of seconds")
    validate(problem)
    return SOLVERS[name](problem, engine=engine, time_limit_s=time_limit_s)
