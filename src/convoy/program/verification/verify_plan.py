"""Verifies that a plan computes its graph: inputs, memory formats, problem, engine, knobs and order of every step.

A plan may come from a file, so nothing in it is trusted. The arguments and results of each step are derived again from the
graph's regions and compared. A step whose engine or knobs cannot be used here runs on the baseline; any other difference is a
PlanError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from convoy.errors import PlanError
from convoy.graph.ir import Graph
from convoy.plan.describe import title
from convoy.plan.plan import Plan, Step
from convoy.problem import ANY_LAYOUT, VOLUME_LAYOUTS, LayoutProblem, Problem, layout_beside
from convoy.program.verification.step_order import check_draws, check_order
from convoy.program.verification.usable_config import on_baseline, why_not
from convoy.regions import Region
from convoy.target import Target

Regions = Mapping[tuple[str, tuple[str, ...]], Region]
"""A graph's regions by pattern and nodes, as a plan's step names them."""

FORMATS = ("nchw", "nhwc")
"""Memory formats that a plan's 4-D values may have; 5-D ones have `VOLUME_LAYOUTS`."""

_AGAIN = "Tune the model again."


@dataclass(frozen=True, slots=True)
class Verified:
    """A plan that computes its graph.

    Attributes:
        plan: the plan, with the baseline in steps whose engine or knobs cannot be used here, and a note for each.
        problems: the problem of each step.
        regions: the region of each step; None for a copy.
    """

    plan: Plan
    problems: tuple[Problem, ...]
    regions: tuple[Region | None, ...]


def verify_plan(
    plan: Plan,
    graph: Graph,
    regions: Regions,
    target: Target,
    extra_engines: tuple[str, ...] = (),
    *,
    ask_engines: bool = True,
) -> Verified:
    """Check every step of a plan against the graph that it is for.

    Args:
        plan: a plan of this graph (the caller has compared digests).
        graph: the captured graph.
        regions: the graph's regions.
        target: the device to run on.
        extra_engines: extra engines as `id=module:Class`.
        ask_engines: whether to ask each engine if it offers the step's knobs, which takes up to 50 ms for a layer on a GPU.

    Raises:
        PlanError: a step is no region of the graph, or reads, makes, copies or waits for other values than its region does; an
            output is not made; or the baseline cannot compute a step whose config cannot be used.
    """
    _check_border(plan, graph)
    values = _AvailableValues(plan, graph)
    problems: list[Problem] = []
    found: list[Region | None] = []
    for index, step in enumerate(plan.steps):
        region = None if step.kind == "convert" else region_of(index, step, regions)
        problems.append(values.copy(index, step) if region is None else values.compute(index, step, region))
        found.append(region)
    for name in graph.outputs:
        values.check_output(name)
    check_order(plan.steps)
    check_draws(plan.steps, graph)
    steps: list[Step] = []
    notes: list[str] = []
    for index, (step, problem) in enumerate(zip(plan.steps, tuple(problems), strict=True)):
        reason = why_not(step.config, problem, target, extra_engines) if ask_engines else ""
        if reason:
            notes.append(f"PyTorch runs {title(step)}, because {step.config.engine} cannot: {reason}")
            step, problems[index] = on_baseline(index, step, problem, target, reason)
        steps.append(step)
    notes = [note for note in dict.fromkeys(notes) if note not in plan.notes]
    verified = (
        replace(plan, steps=tuple(steps), notes=(*plan.notes, *notes)) if notes or steps != list(plan.steps) else plan
    )
    return Verified(verified, tuple(problems), tuple(found))


def region_of(index: int, step: Step, regions: Regions) -> Region:
    """The region that a step names; raises PlanError if the graph does not have it."""
    region = regions.get((step.pattern, step.nodes))
    if region is None:
        raise PlanError(f"steps[{index}]", title(step), "a region of the model's graph", _AGAIN)
    return region


def _formats_of(graph: Graph, value: str) -> tuple[str, ...]:
    """The memory formats that a value may have; none for one without (`Graph.has_layout`)."""
    if not graph.has_layout(value):
        return ()
    return FORMATS if len(graph.values[value].spec.shape) == 4 else VOLUME_LAYOUTS


def _layout_in(graph: Graph, value: str, layout: str) -> str:
    """The memory format of a value that a step of this layout reads or makes."""
    return layout_beside(layout, len(graph.values[value].spec.shape)) if graph.has_layout(value) else ANY_LAYOUT


def _check_border(plan: Plan, graph: Graph) -> None:
    """Only inputs and outputs with memory formats are named."""
    known = {*graph.inputs, *graph.outputs}
    for name, layout in plan.border.items():
        if name not in known or layout not in _formats_of(graph, name):
            allowed = ", ".join((*FORMATS, *VOLUME_LAYOUTS))
            expected = f"4-D inputs and outputs of the graph (5-D ones of a 3-D net) with one of {allowed}"
            raise PlanError("plan.border", f"{name}: {layout}", expected, _AGAIN)


_MASK = re.compile(r":mask=[0-9a-f]{16}")
"""The part of a problem's key that says where the zeros of its weight lie."""


def _check_weights(plan: Plan, step: Step, region: Region) -> None:
    """Raise PlanError where a step's problem is one of its region but for the zeros of the weight."""
    if _MASK.sub("", step.problem) not in {_MASK.sub("", problem.key) for problem in region.problems}:
        return
    tuned = "the pruned weights" if _MASK.search(step.problem) else "the weights, without zeros,"
    named = f": {plan.weights}" if plan.weights else ""
    give = f"Give those (--weights {plan.weights})" if plan.weights else "Load those"
    raise PlanError(
        "weights",
        f"other zeros in {title(step)}",
        f"{tuned} that the plan was tuned for{named}",
        f"{give}, or tune again.",
    )


@dataclass(slots=True)
class _AvailableValues:
    """Values that exist after the steps so far: `NAME` as its step made it, `NAME@LAYOUT` a copy in another layout."""

    plan: Plan
    graph: Graph
    formats: dict[str, str] = field(default_factory=dict[str, str])
    covered: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        for name in self.graph.inputs:
            default = next(iter(_formats_of(self.graph, name)), ANY_LAYOUT)
            self.formats[name] = self.plan.border.get(name, default)

    def compute(self, index: int, step: Step, region: Region) -> Problem:
        """Add the results of a step that computes a region; returns its problem."""
        where = f"steps[{index}]"
        if step.kind != "region":
            raise PlanError(f"{where}.kind", step.kind, "region or convert", _AGAIN)
        problem = next((one for one in region.problems if one.key == step.problem), None)
        if problem is None:
            _check_weights(self.plan, step, region)
            raise PlanError(f"{where}.problem", step.problem, "a problem of its region", _AGAIN)
        if step.layout != problem.layout:
            raise PlanError(f"{where}.layout", step.layout, f"{problem.layout}, the problem's", _AGAIN)
        twice = self.covered.intersection(region.nodes)
        if twice:
            raise PlanError(f"{where}.nodes", min(twice), "nodes that no earlier step computes", _AGAIN)
        self.covered.update(region.nodes)
        expected = tuple(self._name_in(value, problem.layout) for value in region.args)
        if step.args != expected:
            raise PlanError(f"{where}.args", step.args, f"the region's arguments, {expected}", _AGAIN)
        self._check_there(where, step)
        if step.results != region.results:
            raise PlanError(f"{where}.results", step.results, f"the region's results, {region.results}", _AGAIN)
        for name in region.results:
            self._make(where, name, _layout_in(self.graph, name, problem.layout))
        return problem

    def copy(self, index: int, step: Step) -> LayoutProblem:
        """Add the result of a step that copies a value into another memory format; returns its problem."""
        where = f"steps[{index}]"
        if step.pattern or step.nodes or len(step.args) != 1 or step.layout not in (*FORMATS, *VOLUME_LAYOUTS):
            raise PlanError(where, title(step) if step.args else step.layout, "a copy of one value", _AGAIN)
        self._check_there(where, step)
        (source,) = step.args
        value = source.partition("@")[0]
        if step.layout not in _formats_of(self.graph, value):
            raise PlanError(f"{where}.args", source, f"a value that may be in {step.layout}", _AGAIN)
        problem = LayoutProblem(self.graph.values[value].spec, self.formats[source], step.layout)
        if problem.key != step.problem:
            raise PlanError(
                f"{where}.problem", step.problem, f"the copy of the value that it reads, {problem.key}", _AGAIN
            )
        made = f"{value}@{step.layout}"
        if step.results != (made,):
            raise PlanError(f"{where}.results", step.results, f"the copy, {made}", _AGAIN)
        self._make(where, made, step.layout)
        return problem

    def check_output(self, name: str) -> None:
        """Raise PlanError if an output is not made in the memory format that the caller gets."""
        wanted = self.plan.border.get(name)
        there = [slot for slot in (name, f"{name}@{wanted}") if slot in self.formats]
        if not any(wanted in (None, self.formats[slot]) for slot in there):
            raise PlanError("steps", name, f"a step that makes this output{f' in {wanted}' if wanted else ''}", _AGAIN)

    def _name_in(self, value: str, layout: str) -> str:
        """Name of a value in the memory format that a step of this layout reads."""
        layout = ANY_LAYOUT if layout == ANY_LAYOUT else _layout_in(self.graph, value, layout)
        if layout == ANY_LAYOUT or self.formats.get(value) == layout:
            return value
        return f"{value}@{layout}"

    def _check_there(self, where: str, step: Step) -> None:
        missing = [name for name in step.args if name not in self.formats]
        if missing:
            raise PlanError(f"{where}.args", missing[0], "a value that an earlier step makes", _AGAIN)

    def _make(self, where: str, name: str, layout: str) -> None:
        if name in self.formats:
            raise PlanError(f"{where}.results", name, "a value that no earlier step makes", _AGAIN)
        self.formats[name] = layout
