"""From a plan's steps to bound steps: executables built, constants packed, value names turned into slot numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

import torch

from convoy.capture import Captured
from convoy.engines.base import Executable, Packed
from convoy.engines.fresh import build
from convoy.engines.manifest import load_engine
from convoy.errors import PlanError
from convoy.measurement.ahead import Ahead
from convoy.plan.plan import Plan, Step
from convoy.problem import ANY_LAYOUT, LayoutProblem, Problem, TensorSpec
from convoy.program.lifetimes import mark_frees
from convoy.program.marks import link_marks
from convoy.program.placement import Place, place_results
from convoy.regions import Region
from convoy.schedule import finished_before
from convoy.settings import MOST_STREAMS
from convoy.target import Target

Regions = Mapping[tuple[str, tuple[str, ...]], Region]
"""A graph's regions by pattern and nodes covered: how a plan's step names one."""


@dataclass(slots=True)
class BoundStep:
    """One launch, ready: its executable, packed constants and the slots that it reads, writes and frees.

    Attributes:
        step: the plan's step, for people.
        executable: what runs.
        constants: packed constants.
        args: slots read.
        results: slots written.
        specs: spec of each result, for the program that allocates it.
        frees: slots whose last use this is.
        places: for each result, where it lies in a larger value; empty where none does.
        opens: on several streams, larger values that must be there before this launch, ahead of what the one before it frees.
    """

    step: Step
    executable: Executable
    constants: Packed
    args: tuple[int, ...]
    results: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    frees: tuple[int, ...] = ()
    places: tuple[Place | None, ...] = ()
    opens: tuple[Place, ...] = ()

    def touched(self) -> tuple[int, ...]:
        """Slots whose memory a launch reads or writes."""
        return (*self.args, *self.results, *(place.slot for place in self.places if place is not None))


@dataclass(slots=True)
class Bound:
    """A whole plan, bound.

    Attributes:
        steps: in order.
        slot_names: what each slot holds (`NAME` or `NAME@LAYOUT`); slot i holds input i at first.
        inputs: (spec, layout) of the inputs that the steps expect, in call order.
        outputs: slots of the outputs, in order.
        workspace_bytes: the most that any step wants.
        resident_bytes: bytes of all packed constants.
    """

    steps: list[BoundStep]
    slot_names: list[str]
    inputs: list[tuple[TensorSpec, str]]
    outputs: list[int]
    workspace_bytes: int
    resident_bytes: int


PATIENCE_S: Final = 2.0
"""Seconds of building after which the rest may be compiled elsewhere: with full caches a whole net takes less."""

SEEN: Final = 3
"""The last builds, whose median says what the next will take: the first of an engine imports its compiler too, which takes
seconds with full caches."""

PackedSteps = dict[tuple[object, ...], tuple[Executable, Packed]]
"""Executables with their packed constants, by what makes them equal: plans that differ in the schedule alone share them."""


def bind(
    plan: Plan,
    captured: Captured,
    regions: Regions,
    target: Target,
    extra_engines: tuple[str, ...] = (),
    packed: PackedSteps | None = None,
    ahead: Ahead | None = None,
) -> Bound:
    """Build every executable of a plan and pack its constants.

    Args:
        plan: what to run, for this very graph (the caller has compared digests).
        captured: the graph and its constants' tensors.
        regions: the graph's regions.
        target: the device that it will run on.
        extra_engines: extra engines as `id=module:Class`.
        packed: what was built and packed before for this very net; added to.
        ahead: compiles the rest elsewhere where building one by one turns out to take long.

    Raises:
        PlanError: a step that fits no region of the graph, or reads a value that no earlier step makes.
        CompileError: an engine could not build.
    """
    check_order(plan.steps)
    graph = captured.graph
    slots = _slots(graph.inputs, plan.steps)
    problems = [_problem(index, step, captured, regions) for index, step in enumerate(plan.steps)]
    constants = [_constants(index, step, captured, regions) for index, step in enumerate(plan.steps)]
    keys = [_key(step, given) for step, given in zip(plan.steps, constants, strict=True)]
    packed = {} if packed is None else packed
    _build(plan.steps, problems, constants, keys, packed, target, extra_engines, ahead)
    steps = [
        BoundStep(
            step=step,
            executable=packed[key][0],
            constants=packed[key][1],
            args=tuple(slots[name] for name in step.args),
            results=tuple(slots[name] for name in step.results),
            specs=tuple(graph.values[name.partition("@")[0]].spec for name in step.results),
        )
        for step, key in zip(plan.steps, keys, strict=True)
    ]
    outputs = [_output_slot(name, plan, slots) for name in graph.outputs]
    place_results(steps, problems, outputs)
    slot_names = list(slots)
    link_marks(steps, slot_names)
    mark_frees(steps, outputs)
    return Bound(
        steps=steps,
        slot_names=slot_names,
        inputs=[(graph.values[name].spec, plan.border.get(name, ANY_LAYOUT)) for name in graph.inputs],
        outputs=outputs,
        workspace_bytes=max((b.executable.workspace_bytes for b in steps), default=0),
        resident_bytes=sum(executable.resident_bytes(weights) for executable, weights in packed.values()),
    )


def _slots(inputs: Sequence[str], steps: Sequence[Step]) -> dict[str, int]:
    """A slot for each input and for each value that a step makes, by the slot's name."""
    slots = {name: index for index, name in enumerate(inputs)}
    for index, step in enumerate(steps):
        missing = [name for name in step.args if name not in slots]
        if missing:
            raise PlanError(f"steps[{index}].args", missing[0], "a value that an earlier step makes")
        for name in step.results:
            slots.setdefault(name, len(slots))
    return slots


def _key(step: Step, constants: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """What makes two steps' executables and packed constants equal."""
    return (step.problem, step.config, step.layout, tuple(id(constant) for constant in constants))


def _build(
    steps: Sequence[Step],
    problems: Sequence[Problem],
    constants: Sequence[Sequence[torch.Tensor]],
    keys: Sequence[tuple[object, ...]],
    packed: PackedSteps,
    target: Target,
    extra_engines: tuple[str, ...],
    ahead: Ahead | None,
) -> None:
    """Build and pack what is not there yet; where that takes long, have the rest compiled in other processes first."""
    missing = list({key: index for index, key in reversed(list(enumerate(keys))) if key not in packed}.items())[::-1]
    clock = [time.monotonic()]
    for done, (key, index) in enumerate(missing):
        if ahead is not None and done >= SEEN and clock[-1] - clock[0] > PATIENCE_S:
            rest = [(problems[i], steps[i].config) for _, i in missing[done:]]
            lately = [after - before for before, after in pairwise(clock[-SEEN - 1 :])]
            if ahead.build(rest, median(lately)):
                ahead = None
        config = steps[index].config
        executable = build(load_engine(config.engine, extra_engines), problems[index], config.knobs, target)
        packed[key] = (executable, executable.pack(constants[index]))
        clock.append(time.monotonic())


def _region(index: int, step: Step, regions: Regions) -> Region:
    region = regions.get((step.pattern, step.nodes))
    if region is None:
        expected = "a region of the model's graph"
        raise PlanError(f"steps[{index}]", f"{step.pattern}({'+'.join(step.nodes)})", expected, "Tune the model anew.")
    return region


def _constants(index: int, step: Step, captured: Captured, regions: Regions) -> list[torch.Tensor]:
    if step.kind == "convert":
        return []
    return [captured.constants[name] for name in _region(index, step, regions).constants]


def _problem(index: int, step: Step, captured: Captured, regions: Regions):
    if step.kind == "convert":
        problem = LayoutProblem.parse(step.problem)
        if problem.spec != captured.graph.values[step.args[0].partition("@")[0]].spec:
            raise PlanError(f"steps[{index}].problem", step.problem, "a copy of the value that it reads")
        return problem
    for problem in _region(index, step, regions).problems:
        if problem.key == step.problem:
            return problem
    raise PlanError(f"steps[{index}].problem", step.problem, "a problem of its region", "Tune the model anew.")


def _output_slot(name: str, plan: Plan, slots: dict[str, int]) -> int:
    """The slot that holds an output in the memory format that the caller gets."""
    made = {result: step.layout for step in plan.steps for result in step.results}
    wanted = plan.border.get(name, ANY_LAYOUT)
    for slot_name in (f"{name}@{wanted}", name):
        if slot_name in slots and (slot_name not in made or wanted in (ANY_LAYOUT, made[slot_name])):
            return slots[slot_name]
    raise PlanError("steps", name, f"a step that makes this output in layout {wanted}")


def check_order(steps: Sequence[Step]) -> None:
    """Refuse steps that could read a value before it is there.

    Raises:
        PlanError: naming the step.
    """
    order = [(step.stream, step.waits) for step in steps]
    if any(stream >= MOST_STREAMS for stream, _ in order):
        raise PlanError("steps", max(stream for stream, _ in order), f"streams under {MOST_STREAMS}")
    known = finished_before(order, MOST_STREAMS)
    made: dict[str, int] = {}
    for at, step in enumerate(steps):
        for name in step.args:
            if name in made and made[name] > known[at][order[made[name]][0]]:
                raise PlanError(f"steps[{at}].waits", step.waits, f"a wait for {name!r}, made on another stream")
        made.update(dict.fromkeys(step.results, at))
