"""From a plan's steps to bound steps: executables built, constants packed, value names turned into slot numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

import torch

from convoy.capture import Captured
from convoy.engines.base import Executable, Packed
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import BASELINE, load_engine
from convoy.errors import CompileError, PlanError
from convoy.measurement.processes.parallel_compile import ParallelCompile
from convoy.plan.describe import title
from convoy.plan.plan import Plan, Step
from convoy.problem import ANY_LAYOUT, Problem, TensorSpec
from convoy.program.concat_in_place import ChannelSlice, with_results_in_place
from convoy.program.lifetimes import with_frees
from convoy.program.verify_plan import Regions, check_order, on_baseline, verify_plan
from convoy.program.zero_marks import with_zero_marks
from convoy.regions import Region
from convoy.target import Target
from convoy.user_warning import warn_user

__all__ = ["BoundPlan", "BoundStep", "PackedSteps", "Regions", "bind", "check_order"]


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
    places: tuple[ChannelSlice | None, ...] = ()
    opens: tuple[ChannelSlice, ...] = ()

    def touched(self) -> tuple[int, ...]:
        """Slots whose memory a launch reads or writes."""
        return (*self.args, *self.results, *(place.slot for place in self.places if place is not None))


@dataclass(slots=True)
class BoundPlan:
    """A whole plan, bound.

    Attributes:
        plan: what runs: the plan given, or with the baseline in steps whose engine or knobs do not hold here, and notes of them.
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
    plan: Plan | None = None


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
    ahead: ParallelCompile | None = None,
    *,
    tuned: bool = False,
) -> BoundPlan:
    """Build every executable of a plan and pack its constants, after proof that the plan computes the graph (`verify_plan`).

    Args:
        plan: what to run, for this very graph (the caller has compared digests).
        captured: the graph and its constants' tensors.
        regions: the graph's regions.
        target: the device that it will run on.
        extra_engines: extra engines as `id=module:Class`.
        packed: what was built and packed before for this very net; added to.
        ahead: compiles the rest elsewhere where building one by one turns out to take long.
        tuned: this process chose the configs from what the engines offer, and need not ask them again.

    Raises:
        PlanError: the plan does not compute the graph.
        CompileError: the baseline could not build. Where another engine could not, its steps run on the baseline, with a note.
    """
    graph = captured.graph
    packed = {} if packed is None else packed
    verified = verify_plan(plan, graph, regions, target, extra_engines, ask_engines=not tuned)
    plan, problems = verified.plan, verified.problems
    slots = _slots(graph.inputs, plan.steps)
    constants = [_constants(captured, region) for region in verified.regions]
    keys = [_key(step, given) for step, given in zip(plan.steps, constants, strict=True)]
    failed = _build(plan.steps, problems, constants, keys, packed, target, extra_engines, ahead)
    if failed:
        plan = _without(plan, problems, keys, failed, target)
        keys = [_key(step, given) for step, given in zip(plan.steps, constants, strict=True)]
        _build(plan.steps, problems, constants, keys, packed, target, extra_engines, None)
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
    with_results_in_place(steps, problems, outputs)
    slot_names = list(slots)
    with_zero_marks(steps, slot_names)
    with_frees(steps, outputs)
    return BoundPlan(
        steps=steps,
        slot_names=slot_names,
        inputs=[(graph.values[name].spec, plan.border.get(name, ANY_LAYOUT)) for name in graph.inputs],
        outputs=outputs,
        workspace_bytes=max((b.executable.workspace_bytes for b in steps), default=0),
        resident_bytes=sum(executable.resident_bytes(weights) for executable, weights in packed.values()),
        plan=plan,
    )


def _slots(inputs: Sequence[str], steps: Sequence[Step]) -> dict[str, int]:
    """A slot for each input and for each value that a step makes, by the slot's name."""
    slots = {name: index for index, name in enumerate(inputs)}
    for step in steps:
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
    ahead: ParallelCompile | None,
) -> dict[tuple[object, ...], CompileError]:
    """Build and pack what is not there yet; where that takes long, have the rest compiled in other processes first.

    Returns:
        What could not be compiled, by key; nothing of the baseline, whose error is raised.
    """
    failed: dict[tuple[object, ...], CompileError] = {}
    missing = list({key: index for index, key in reversed(list(enumerate(keys))) if key not in packed}.items())[::-1]
    clock = [time.monotonic()]
    for done, (key, index) in enumerate(missing):
        if ahead is not None and done >= SEEN and clock[-1] - clock[0] > PATIENCE_S:
            rest = [(problems[i], steps[i].config) for _, i in missing[done:]]
            lately = [after - before for before, after in pairwise(clock[-SEEN - 1 :])]
            if ahead.build(rest, median(lately)):
                ahead = None
        config = steps[index].config
        try:
            executable = build(load_engine(config.engine, extra_engines), problems[index], config.knobs, target)
            packed[key] = (executable, executable.pack(constants[index]))
        except CompileError as error:
            if config.engine == BASELINE:
                raise
            failed[key] = error
        clock.append(time.monotonic())
    return failed


def _without(
    plan: Plan,
    problems: Sequence[Problem],
    keys: Sequence[tuple[object, ...]],
    failed: dict[tuple[object, ...], CompileError],
    target: Target,
) -> Plan:
    """A plan with the baseline in place of what could not be compiled, and notes of it; warns too."""
    steps, notes = list(plan.steps), list(plan.notes)
    for index, (step, key) in enumerate(zip(plan.steps, keys, strict=True)):
        if key in failed:
            error = failed[key]
            steps[index] = on_baseline(index, step, problems[index], target, error.summary)
            notes.append(f"{title(step)} runs as PyTorch runs it, {step.config.engine} does not: {error.summary}")
    names = ", ".join(sorted({error.engine for error in failed.values()}))
    first = next(iter(failed.values())).summary
    warn_user(
        f"{sum(key in failed for key in keys)} steps run as PyTorch runs them, for {names} could not be "
        f"compiled ({first}). Mend the compiler, or tune the model anew."
    )
    return replace(plan, steps=tuple(steps), notes=tuple(dict.fromkeys(notes)))


def _constants(captured: Captured, region: Region | None) -> list[torch.Tensor]:
    return [] if region is None else [captured.constants[name] for name in region.constants]


def _output_slot(name: str, plan: Plan, slots: dict[str, int]) -> int:
    """The slot that holds an output in the memory format that the caller gets."""
    made = {result: step.layout for step in plan.steps for result in step.results}
    wanted = plan.border.get(name, ANY_LAYOUT)
    for slot_name in (f"{name}@{wanted}", name):
        if slot_name in slots and (slot_name not in made or wanted in (ANY_LAYOUT, made[slot_name])):
            return slots[slot_name]
    raise PlanError("steps", name, f"a step that makes this output in layout {wanted}")
