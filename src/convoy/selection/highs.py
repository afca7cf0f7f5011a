"""HiGHS, the solver of integer programs, and the checks of its answers."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from convoy.errors import InputError, InternalError, SelectionError
from convoy.selection.linear import LinearProgram

_OPTIONS = {
    "output_flag": False,
    "parallel": "off",
    "random_seed": 0,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
    "presolve": "off",
}
"""One thread and a fixed seed, to the optimum. HiGHS 1.16.0's presolve calls feasible programs infeasible, and returns
solutions of others that break their rows (1.14.0 has such a fault too, HiGHS issue 3090). Without presolve, 1.16.0 finds
the optimum of every net that can be solved by enumeration, and DenseNet-201, with and without a budget, takes as long with
1.15.1 as with presolve."""

_TOLERANCE = 1e-5
"""By how much a row may be broken. HiGHS allows itself 1e-6 for a row and for an integer column; the largest coefficients of
a program are about 1."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The value of every column, and the proven lower bound on the cost (below the cost if time ran out)."""

    values: Sequence[float]
    bound: float


class OutOfTimeError(SelectionError):
    """HiGHS stopped before it had found any solution."""


def minimise(program: LinearProgram, start: Mapping[int, float], deadline: float) -> Optimum | None:
    """Solve a program; None if it has no solution.

    Args:
        program: the program.
        start: values of some columns to begin with; HiGHS completes them, or ignores them if it cannot.
        deadline: stop then, by `time.monotonic`, with the best solution found so far.

    Raises:
        InputError: the package highspy is missing.
        OutOfTimeError: the deadline passed before there was a solution.
        InternalError: the answer breaks a row or a bound of the program.
    """
    package = _import_package()
    solver = package.Highs()
    limit = {"time_limit": max(0.0, deadline - time.monotonic())} if math.isfinite(deadline) else {}
    for name, value in (_OPTIONS | limit).items():
        solver.setOptionValue(name, value)
    solver.passModel(_model(package, program))
    if start:
        solver.setSolution(len(start), list(start), list(start.values()))
    solver.run()
    status = solver.getModelStatus()
    if status in (package.HighsModelStatus.kInfeasible, package.HighsModelStatus.kUnboundedOrInfeasible):
        return None
    if solver.getInfo().primal_solution_status != package.SolutionStatus.kSolutionStatusFeasible:
        raise OutOfTimeError(f"no choice was found before HiGHS stopped: {solver.modelStatusToString(status)}")
    values = list(solver.getSolution().col_value)
    if broken := program.broken(values, _TOLERANCE):
        raise invalid_answer(f"gave a solution that breaks {broken}")
    return Optimum(values, solver.getInfo().mip_dual_bound)


def invalid_answer(what: str) -> InternalError:
    """The error for an answer that cannot be right."""
    version = _import_package().Highs().version()
    return InternalError(
        "selection", f"HiGHS {version} {what}", "Install another version of highspy, or use solver 'greedy'."
    )


def _import_package() -> ModuleType:
    try:
        return importlib.import_module("highspy")
    except ImportError as error:
        todo = "Run `pip install highspy`, or use solver 'greedy'."
        raise InputError("solver", "exact", "the package highspy to be installed", todo) from error


def _model(package: ModuleType, program: LinearProgram) -> object:
    lp = package.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.rows)
    lp.col_cost_ = program.cost
    lp.col_lower_ = [0.0] * len(program.cost)
    lp.col_upper_ = program.upper
    kinds = (package.HighsVarType.kContinuous, package.HighsVarType.kInteger)
    lp.integrality_ = [kinds[integer] for integer in program.integer]
    lp.row_lower_ = [least for least, _, _ in program.rows]
    lp.row_upper_ = [most for _, most, _ in program.rows]
    lp.a_matrix_.format_ = package.MatrixFormat.kRowwise
    starts = [0]
    for _, _, terms in program.rows:
        starts.append(starts[-1] + len(terms))
    lp.a_matrix_.start_ = starts
    lp.a_matrix_.index_ = [column for _, _, terms in program.rows for column, _ in terms]
    lp.a_matrix_.value_ = [value for _, _, terms in program.rows for _, value in terms]
    return lp
