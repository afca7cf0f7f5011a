"""The integer program of a selection problem: exact cover of the nodes, memory formats, conversions paid once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from convoy.selection.linear import LinearProgram, Terms, minus, plus
from convoy.selection.problem import Candidate, SelectionProblem

ValueLayout = tuple[str, str]


@dataclass(slots=True)
class CoverProgram:
    """The program and the meaning of its columns.

    Attributes:
        problem: the selection problem.
        pool: the candidates; candidate i is column i.
        program: the linear program.
        makers: columns of the candidates that make a value in a memory format.
        readers: columns of the candidates that read it in one.
        conversions: column of each conversion, by (value, from, to).
    """

    problem: SelectionProblem
    pool: Sequence[Candidate]
    program: LinearProgram = field(default_factory=LinearProgram)
    makers: dict[ValueLayout, list[int]] = field(default_factory=dict[ValueLayout, list[int]])
    readers: dict[ValueLayout, list[int]] = field(default_factory=dict[ValueLayout, list[int]])
    conversions: dict[tuple[str, str, str], int] = field(default_factory=dict[tuple[str, str, str], int])

    def layouts(self, value: str) -> tuple[str, ...]:
        """Memory formats of a value; only `any` if it is not 4-D."""
        return self.problem.value_layouts.get(value) or (self.problem.border_layout(value),)

    def converted(self, value: str, layout: str) -> list[int]:
        """Columns of the conversions of a value to a format; at most one of them is 1."""
        sources = self.layouts(value)
        return [self.conversions[k] for s in sources if (k := (value, s, layout)) in self.conversions]


def formulate(problem: SelectionProblem, pool: Sequence[Candidate]) -> CoverProgram:
    """Write the selection problem as an integer program, without its memory budget.

    Columns, all 0 or 1: `x[i]`, candidate i is chosen, at its time; `c[v, s, l]`, value v is converted from format s to
    format l, at the time of the copy. Rows, with `made[v, l]` the sum of the candidates that make v in l (1 for an input in
    its border format):

    - each node: its candidates sum to 1;
    - each conversion: `c[v, s, l] <= made[v, s]`: a value is converted only from the one format in which it was made;
    - each value v, format l and set of readers in l of which at most one can be chosen: `readers <= made[v, l] + sum over s
      of c[v, s, l]`. An output is always read in its border format.

    The last rule also keeps a region from being chosen while another region reads a value that it hides: neither `made` nor a
    conversion can then be 1.
    """
    model = CoverProgram(problem, pool)
    covering: dict[str, list[int]] = {node: [] for node in problem.nodes}
    for candidate in pool:
        column = model.program.binary(candidate.median_us)
        region = problem.regions[candidate.region]
        for node in region.nodes:
            covering[node].append(column)
        for value in dict.fromkeys(region.args):
            model.readers.setdefault((value, problem.layout_of(value, candidate.layout)), []).append(column)
        for value in region.results:
            model.makers.setdefault((value, problem.layout_of(value, candidate.layout)), []).append(column)
    for columns in covering.values():
        model.program.equal(plus(columns), 1.0)
    values = dict.fromkeys([*(v for v, _ in model.readers), *problem.outputs])
    for value in values:
        _supply(model, value)
    return model


def _supply(model: CoverProgram, value: str) -> None:
    """Columns and rows that provide a value in every format in which it is read."""
    given = model.problem.border_layout(value) if value in model.problem.inputs else ""
    wanted = model.problem.border_layout(value) if value in model.problem.outputs else ""
    demanded = [x for x in model.layouts(value) if model.readers.get((value, x)) or x == wanted]
    for layout in demanded:
        for source in model.layouts(value):
            time_us = model.problem.convert_us.get((value, source, layout))
            makers = model.makers.get((value, source), [])
            if source != layout and time_us is not None and (makers or source == given):
                column = model.program.binary(time_us)
                model.conversions[value, source, layout] = column
                if source != given:
                    model.program.at_most([(column, 1.0), *minus(makers)], 0.0)
        if layout == given:
            continue
        supply: Terms = [*minus(model.makers.get((value, layout), [])), *minus(model.converted(value, layout))]
        for group in _exclusive_groups(model, model.readers.get((value, layout), [])):
            model.program.at_most([*plus(group), *supply], 0.0)
        if layout == wanted:
            model.program.at_most(supply, -1.0)


def _exclusive_groups(model: CoverProgram, columns: Sequence[int]) -> list[list[int]]:
    """Split candidates into sets whose regions all share a node: few rows, and tight ones."""
    groups: list[tuple[set[str], list[int]]] = []
    for column in columns:
        nodes = set(model.problem.regions[model.pool[column].region].nodes)
        for common, group in groups:
            if not common.isdisjoint(nodes):
                common &= nodes
                group.append(column)
                break
        else:
            groups.append((nodes, [column]))
    return [group for _, group in groups]
