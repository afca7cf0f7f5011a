"""Checks a selection problem before a solver looks at it, so that solvers may trust what they read."""

from __future__ import annotations

import math
from collections.abc import Iterable

from convoy.errors import InputError, InternalError
from convoy.selection.problem import SelectionProblem


def validate(problem: SelectionProblem) -> None:
    """Refuse a problem that contradicts itself.

    Raises:
        InputError: `memory_budget_bytes`, which the user gives, is no positive number.
        InternalError: naming any other field, what it holds and what was expected.
    """
    _names(problem)
    _regions(problem)
    _makers(problem)
    _sizes_and_layouts(problem)
    _candidates(problem)


def _names(problem: SelectionProblem) -> None:
    for field, names in (("nodes", problem.nodes), ("inputs", problem.inputs)):
        if (twice := _repeated(names)) is not None:
            raise _fault(field, twice, "names that differ")
    if problem.memory_budget_bytes is not None and problem.memory_budget_bytes <= 0:
        raise InputError("memory_budget_bytes", problem.memory_budget_bytes, "a positive number of bytes, or None")


def _regions(problem: SelectionProblem) -> None:
    known = set(problem.nodes)
    for index, region in enumerate(problem.regions):
        where = f"regions[{index}]"
        if not region.nodes or _repeated(region.nodes) is not None:
            raise _fault(f"{where}.nodes", region.nodes, "at least one node, each once")
        for node in region.nodes:
            if node not in known:
                raise _fault(f"{where}.nodes", node, "names of the graph's nodes")
        if (twice := _repeated(region.results)) is not None:
            raise _fault(f"{where}.results", twice, "names that differ")
        for value in region.results:
            if value in region.args or value in problem.inputs:
                raise _fault(f"{where}.results", value, "values that are made here and not read")


def _makers(problem: SelectionProblem) -> None:
    """A value is made by one node: regions with it among their results have a node in common, so one at most is chosen."""
    common: dict[str, set[str]] = {}
    for index, region in enumerate(problem.regions):
        for value in region.results:
            common.setdefault(value, set(region.nodes)).intersection_update(region.nodes)
            if not common[value]:
                raise _fault(f"regions[{index}].results", value, "a value that no region of other nodes makes too")
    available = common.keys() | set(problem.inputs)
    for index, region in enumerate(problem.regions):
        for value in region.args:
            if value not in available:
                raise _fault(f"regions[{index}].args", value, "an input of the graph or a result of a region")
    for value in problem.outputs:
        if value not in available:
            raise _fault("outputs", value, "an input of the graph or a result of a region")


def _sizes_and_layouts(problem: SelectionProblem) -> None:
    seen: set[str] = {*problem.inputs, *problem.outputs}
    for region in problem.regions:
        seen.update(region.args, region.results)
    for value in sorted(seen):
        if problem.value_bytes.get(value, -1) < 0:
            raise _fault("value_bytes", value, "a size of at least 0 bytes for every value")
    for value, layouts in problem.value_layouts.items():
        if not layouts or _repeated(layouts) is not None:
            raise _fault("value_layouts", layouts, f"at least one memory format of {value}, each once")
    for value, layout in problem.border.items():
        if layout not in problem.value_layouts.get(value, (layout,)):
            raise _fault("border", layout, f"one of {', '.join(problem.value_layouts[value])} for {value}")
    for (value, source, layout), time_us in problem.convert_us.items():
        if not 0 <= time_us < math.inf:
            raise _fault("convert_us", time_us, f"a time of at least 0 for {value} from {source} to {layout}")


def _candidates(problem: SelectionProblem) -> None:
    covered: set[str] = set()
    for index, candidate in enumerate(problem.candidates):
        where = f"candidates[{index}]"
        if not 0 <= candidate.region < len(problem.regions):
            raise _fault(f"{where}.region", candidate.region, f"an index below {len(problem.regions)}")
        for name in ("median_us", "spread_us", "workspace_bytes", "resident_bytes"):
            if not 0 <= getattr(candidate, name) < math.inf:
                raise _fault(f"{where}.{name}", getattr(candidate, name), "a finite number of at least 0")
        covered.update(problem.regions[candidate.region].nodes)
    for node in problem.nodes:
        if node not in covered:
            raise _fault("candidates", node, "a candidate for every node: at least its baseline")


def _fault(field: str, value: object, expected: str) -> InternalError:
    """Problems are made by Convoy from its graph and from measured rows, so no argument of the user's is wrong."""
    return InternalError("selection", f"{field} of the selection problem has {value!r}, expected {expected}")


def _repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
