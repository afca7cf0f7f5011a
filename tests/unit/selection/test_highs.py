"""The solver of integer programs: right answers pass, wrong ones are refused with its version."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import highspy
import pytest

from convoy.errors import InputError, InternalError
from convoy.selection import SelectionProblem, solve
from convoy.selection.exact import minimum_memory
from convoy.selection.highs import OutOfTimeError, minimise
from convoy.selection.linear import LinearProgram, plus


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> SelectionProblem:
    """A small net whose fastest choice is neither the greedy one nor the only one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    nets = importlib.import_module("small_nets")
    for seed in range(100):
        found = nets.random_net(seed)
        every = list(nets.outcomes(found))
        if len(every) > 4 and solve(found, "greedy").total_us > min(o.total_us for o in every) + 1.0:
            return found
    raise AssertionError("no such net")


def plant(monkeypatch: pytest.MonkeyPatch, **methods: Callable[[highspy.Highs], object]) -> None:
    """Have a solver in place of HiGHS, some of whose methods answer wrongly."""
    package = ModuleType("highspy")
    package.__dict__.update(vars(highspy))
    package.__dict__["Highs"] = type("Highs", (highspy.Highs,), dict(methods))
    monkeypatch.setitem(sys.modules, "highspy", package)


def knapsack() -> LinearProgram:
    """Two of three things, at 1, 2 and 3; the last is not to be had without the second."""
    program = LinearProgram()
    columns = [program.binary(cost) for cost in (3.0, 2.0, 1.0)]
    program.equal(plus(columns), 2.0)
    program.at_most([(columns[2], 1.0), (columns[1], -1.0)], 0.0)
    return program


def test_the_optimum_of_a_small_program() -> None:
    found = minimise(knapsack(), {}, math.inf)
    assert found is not None
    assert [round(value) for value in found.values] == [0, 1, 1]
    assert found.bound == pytest.approx(3.0)


def test_a_program_without_a_solution_has_none() -> None:
    program = knapsack()
    program.at_most(plus(range(3)), 1.0)
    assert minimise(program, {}, math.inf) is None


def test_a_deadline_that_has_passed_is_an_error_of_its_own() -> None:
    program = LinearProgram()
    columns = [program.binary(float(i % 7)) for i in range(60)]
    for i in range(40):
        program.equal(plus(columns[i : i + 20]), 7.0)
    with pytest.raises(OutOfTimeError, match="before HiGHS stopped"):
        minimise(program, {}, time.monotonic() - 1.0)


@pytest.mark.parametrize(
    ("values", "broken"),
    [
        ([1.0, 1.0, 1.0], r"row 0: 3 is not in \[2, 2\]"),
        ([1.0, 0.0, 1.0], r"row 1: 1 is not in \[-inf, 0\]"),
        ([0.5, 1.0, 0.5], "column 0: 0.5 is not an integer"),
        ([0.0, 2.0, 0.0], r"column 1: 2 is not in \[0, 1\]"),
    ],
)
def test_a_solution_that_breaks_the_program_is_refused(
    monkeypatch: pytest.MonkeyPatch, values: list[float], broken: str
) -> None:
    plant(monkeypatch, getSolution=lambda _: SimpleNamespace(col_value=values))
    with pytest.raises(
        InternalError, match=rf"HiGHS \d+\.\d+\.\d+ gave a solution that breaks {broken}\. Install another"
    ):
        minimise(knapsack(), {}, math.inf)


def test_what_is_called_infeasible_where_a_choice_is_known_is_refused(
    monkeypatch: pytest.MonkeyPatch, problem: SelectionProblem
) -> None:
    plant(monkeypatch, getModelStatus=lambda _: highspy.HighsModelStatus.kInfeasible)
    for solver in (solve, minimum_memory):
        with pytest.raises(InternalError, match=r"HiGHS \S+ found no choice where there is one.*solver 'greedy'"):
            solver(problem)


def test_a_bound_above_a_choice_that_is_known_is_refused(
    monkeypatch: pytest.MonkeyPatch, problem: SelectionProblem
) -> None:
    known = solve(problem, "greedy").total_us
    info = {"primal_solution_status": highspy.SolutionStatus.kSolutionStatusFeasible, "mip_dual_bound": known * 2}
    plant(monkeypatch, getInfo=lambda _: SimpleNamespace(**info))
    with pytest.raises(InternalError, match=r"HiGHS \S+ found no choice under \S+ us where one takes"):
        solve(problem)


def test_without_the_package_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, problem: SelectionProblem
) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(InputError, match="pip install highspy"):
        solve(problem)
