"""A selection as steps on one stream: in launch order, each copy right before its first use."""

from __future__ import annotations

from convoy.plan.plan import Step
from convoy.selection import Candidate, Conversion, Selection, SelectionProblem


def serial_steps(problem: SelectionProblem, selection: Selection) -> tuple[Step, ...]:
    """The steps of a selection on one stream.

    A value is named `NAME` in the memory format in which it was made (for a graph input: as the caller gives it), and
    `NAME@LAYOUT` for a copy in another one.
    """
    native = {value: problem.border_layout(value) for value in problem.inputs}
    pending = {(c.value, c.layout): c for c in selection.conversions}
    steps: list[Step] = []

    def name_in(value: str, layout: str) -> str:
        """The name of a value in a memory format; its copy is made now, if it has not been made."""
        wanted = problem.layout_of(value, layout)
        if native[value] == wanted:
            return value
        conversion = pending.pop((value, wanted), None)
        if conversion is not None:
            steps.append(_copy(problem, conversion))
        return f"{value}@{wanted}"

    for candidate in selection.chosen:
        region = problem.regions[candidate.region]
        args = tuple(name_in(value, candidate.layout) for value in region.args)
        native.update((value, problem.layout_of(value, candidate.layout)) for value in region.results)
        steps.append(_compute(problem, candidate, args))
    for value in problem.outputs:
        if value in problem.value_layouts:
            name_in(value, problem.border_layout(value))
    return tuple(steps)


def _compute(problem: SelectionProblem, candidate: Candidate, args: tuple[str, ...]) -> Step:
    region = problem.regions[candidate.region]
    return Step(
        kind="region",
        pattern=region.pattern,
        nodes=region.nodes,
        args=args,
        results=region.results,
        problem=candidate.problem,
        config=candidate.config,
        layout=candidate.layout,
        median_us=candidate.median_us,
        workspace_bytes=candidate.workspace_bytes,
        predicted=candidate.predicted and candidate.median_us > 0,  # 0: it writes in place
    )


def _copy(problem: SelectionProblem, conversion: Conversion) -> Step:
    copy = problem.copies[conversion.value, conversion.source, conversion.layout]
    return Step(
        kind="convert",
        pattern="",
        nodes=(),
        args=(conversion.value,),
        results=(f"{conversion.value}@{conversion.layout}",),
        problem=copy.problem,
        config=copy.config,
        layout=conversion.layout,
        median_us=conversion.median_us,
        predicted=conversion.predicted,
    )
