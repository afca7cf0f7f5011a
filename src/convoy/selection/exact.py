"""The exact optimum, as an integer program solved by HiGHS.

One binary variable a candidate; every node is covered exactly once; a region that reads a value needs a chosen region that
makes it; a value that is read in a memory format in which it was not made is copied once, and that is paid. The linear
relaxation is nearly integral: consumers are gathered by node, and of the regions that cover a node one is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from convoy.errors import InputError, SelectionError
from convoy.selection.eligible import worthwhile
from convoy.selection.order import LaunchOrder
from convoy.selection.problem import Candidate, Selection, SelectionProblem
from convoy.selection.settle import settle

Terms = dict[int, float]
"""Coefficients by variable."""


@dataclass(slots=True)
class _Program:
    """Rows and columns before they go to the solver."""

    costs: list[float] = field(default_factory=list[float])
    uppers: list[float] = field(default_factory=list[float])
    binaries: int = 0
    copies: dict[int, str] = field(default_factory=dict[int, str])
    rows: list[tuple[float, float, Terms]] = field(default_factory=list[tuple[float, float, Terms]])

    def variable(self, cost: float, upper: float = 1.0) -> int:
        """A new variable of at least 0."""
        self.costs.append(cost)
        self.uppers.append(upper)
        return len(self.costs) - 1

    def row(self, terms: Terms, *, least: float = -np.inf, most: float = np.inf) -> None:
        """Least <= sum of terms <= most."""
        self.rows.append((least, most, terms))


def exact(problem: SelectionProblem, time_limit_s: float = 20.0, solver: str = "exact") -> Selection:
    """The choice of least total time.

    Args:
        problem: what is on offer.
        time_limit_s: after which the best choice found so far is returned, with its bound.
        solver: what to call the result.

    Raises:
        InputError: highspy is not installed.
        SelectionError: nothing satisfies the memory budget; the message names the least that would do.
    """
    candidates = worthwhile(problem)
    program = _program(problem, candidates)
    if problem.memory_budget_bytes is not None:
        _limit_memory(problem, candidates, program, problem.memory_budget_bytes)
    found = _solve(program, time_limit_s)
    if found is None:
        raise SelectionError(_too_small(problem, candidates, time_limit_s))
    values, bound = found
    chosen = [c for c, value in zip(candidates, values, strict=False) if value > 0.5]
    return settle(problem, LaunchOrder(problem), solver, chosen, bound)


def single(problem: SelectionProblem, engine: str, time_limit_s: float = 20.0) -> Selection:
    """One engine wherever it can, the baseline elsewhere: the first of the classic strategies.

    Raises:
        InputError: the engine has no candidate at all.
    """
    able = {c.region for c in problem.candidates if c.config.engine == engine}
    if not able:
        raise InputError("solver", f"single:{engine}", "an engine that can do at least one region of this net")
    kept = tuple(c for c in problem.candidates if c.config.engine == engine or (c.baseline and c.region not in able))
    return exact(replace(problem, candidates=kept), time_limit_s, f"single:{engine}")


def _program(problem: SelectionProblem, candidates: list[Candidate]) -> _Program:
    program = _Program()
    for candidate in candidates:
        program.variable(candidate.median_us)
    program.binaries = len(candidates)
    by_node: dict[str, Terms] = {node: {} for node in problem.nodes}
    makers: dict[str, dict[str, Terms]] = {}
    readers: dict[str, dict[str, dict[str, Terms]]] = {}
    for index, candidate in enumerate(candidates):
        region = problem.regions[candidate.region]
        for node in region.nodes:
            by_node[node][index] = 1.0
        for value in region.results:
            layout = problem.layout_of(value, candidate.layout)
            makers.setdefault(value, {}).setdefault(layout, {})[index] = 1.0
        for value in region.args:
            layout = problem.layout_of(value, candidate.layout)
            # The first node stands for the reader: regions that share it exclude each other.
            readers.setdefault(value, {}).setdefault(region.nodes[0], {}).setdefault(layout, {})[index] = 1.0
    for terms in by_node.values():
        program.row(terms, least=1.0, most=1.0)
    for value, by_reader in readers.items():
        for by_layout in by_reader.values():
            _need(problem, program, value, makers.get(value, {}), by_layout)
    _conversions(problem, program, makers, readers)
    return program


def _need(
    problem: SelectionProblem, program: _Program, value: str, made: dict[str, Terms], read: dict[str, Terms]
) -> None:
    """Whoever reads a value needs somebody who makes it."""
    if value in problem.inputs:
        return
    program.row(
        {**{i: 1.0 for t in made.values() for i in t}, **{i: -1.0 for t in read.values() for i in t}}, least=0.0
    )


def _conversions(
    problem: SelectionProblem,
    program: _Program,
    makers: dict[str, dict[str, Terms]],
    readers: dict[str, dict[str, dict[str, Terms]]],
) -> None:
    for value, layouts in problem.value_layouts.items():
        made = makers.get(value, {})
        for layout in layouts:
            given = value in problem.inputs and problem.border_layout(value) == layout
            demands = [by_layout[layout] for by_layout in readers.get(value, {}).values() if layout in by_layout]
            if given or (not demands and value not in problem.outputs):
                continue
            costs = [t for (v, _, to), t in problem.convert_us.items() if v == value and to == layout]
            copied = program.variable(min(costs, default=0.0), 1.0 if costs else 0.0)
            program.copies[copied] = value
            supply = {**made.get(layout, {}), copied: 1.0}
            for demand in demands:
                program.row({**supply, **{i: supply.get(i, 0.0) - 1.0 for i in demand}}, least=0.0)
            if value in problem.outputs and problem.border_layout(value) == layout:
                program.row(supply, least=1.0)


def live_values(problem: SelectionProblem) -> list[set[str]]:
    """For each region the values that may be in use while it runs, whatever else is chosen: more rather than fewer."""
    place = {node: i for i, node in enumerate(problem.nodes)}
    first: dict[str, int] = dict.fromkeys(problem.inputs, -1)
    last: dict[str, int] = dict.fromkeys((*problem.inputs, *problem.outputs), len(problem.nodes))
    for region in problem.regions:
        for value in region.results:
            first[value] = min(first.get(value, len(place)), place[region.nodes[-1]])
        for value in region.args:
            last[value] = max(last.get(value, -1), place[region.nodes[-1]])
    found: list[set[str]] = []
    for region in problem.regions:
        start, end = place[region.nodes[0]], place[region.nodes[-1]]
        found.append({v for v, begins in first.items() if begins <= end and last.get(v, begins) >= start})
    return found


def _limit_memory(
    problem: SelectionProblem, candidates: list[Candidate], program: _Program, budget: float, slack: int | None = None
) -> None:
    """Live values, their copies, workspace and packed constants stay within the budget while each region runs."""
    live = live_values(problem)
    resident = {i: float(c.resident_bytes) for i, c in enumerate(candidates) if c.resident_bytes}
    for region in {c.region for c in candidates}:
        terms = dict(resident)
        terms |= {copied: float(problem.value_bytes[v]) for copied, v in program.copies.items() if v in live[region]}
        in_use = sum(problem.value_bytes[value] for value in live[region])
        for index, candidate in enumerate(candidates):
            if candidate.region == region:
                terms[index] = terms.get(index, 0.0) + candidate.workspace_bytes + in_use
        if slack is not None:
            terms[slack] = -1.0
        program.row(terms, most=budget)


def _too_small(problem: SelectionProblem, candidates: list[Candidate], time_limit_s: float) -> str:
    """What the least budget would be."""
    program = _program(problem, candidates)
    program.costs = [0.0] * len(program.costs)
    peak = program.variable(1.0, np.inf)
    _limit_memory(problem, candidates, program, 0.0, slack=peak)
    found = _solve(program, time_limit_s)
    budget = problem.memory_budget_bytes
    if found is None:
        return "no choice of candidates covers the net"
    return f"memory_budget: {budget} bytes are too few for any choice; at least {int(found[1]) + 1} bytes are needed"


def _solve(program: _Program, time_limit_s: float) -> tuple[list[float], float] | None:
    """Values of the variables and the proven bound; None where nothing is feasible."""
    try:
        import highspy
    except ImportError:
        todo = "Install it (pip install highspy) or choose --solver greedy."
        raise InputError("solver", "exact", "the package highspy", todo) from None
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", time_limit_s)
    solver.setOptionValue("mip_rel_gap", 1e-9)
    count = len(program.costs)
    solver.addVars(count, np.zeros(count), np.asarray(program.uppers))
    columns = np.arange(count, dtype=np.int32)
    solver.changeColsCost(count, columns, np.asarray(program.costs))
    kinds = np.array([highspy.HighsVarType.kInteger] * program.binaries)
    solver.changeColsIntegrality(program.binaries, columns[: program.binaries], kinds)
    starts = np.cumsum([0, *(len(terms) for _, _, terms in program.rows)], dtype=np.int32)
    solver.addRows(
        len(program.rows),
        np.asarray([least for least, _, _ in program.rows]),
        np.asarray([most for _, most, _ in program.rows]),
        int(starts[-1]),
        starts[:-1],
        np.asarray(list(_flatten(terms.keys() for _, _, terms in program.rows)), dtype=np.int32),
        np.asarray(list(_flatten(terms.values() for _, _, terms in program.rows)), dtype=np.float64),
    )
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    return list(solver.getSolution().col_value), float(info.mip_dual_bound)


def _flatten(parts: Iterable[Iterable[float]]) -> Iterable[float]:
    return (item for part in parts for item in part)
