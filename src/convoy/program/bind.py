"""From a plan's steps to bound steps: executables built, constants packed, value names turned into slot numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from convoy.capture import Captured
from convoy.engines.base import Executable, Packed
from convoy.engines.manifest import load_engine
from convoy.errors import PlanError
from convoy.plan.plan import Plan, Step
from convoy.problem import ANY_LAYOUT, LayoutProblem, TensorSpec
from convoy.regions import Region
from convoy.target import Target

DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}

MEMORY_FORMATS: Mapping[str, torch.memory_format] = {
    "nchw": torch.contiguous_format,
    "nhwc": torch.channels_last,
}

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
    """

    step: Step
    executable: Executable
    constants: Packed
    args: tuple[int, ...]
    results: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    frees: tuple[int, ...] = ()


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


def bind(
    plan: Plan, captured: Captured, regions: Regions, target: Target, extra_engines: tuple[str, ...] = ()
) -> Bound:
    """Build every executable of a plan and pack its constants.

    Args:
        plan: what to run, for this very graph (the caller has compared digests).
        captured: the graph and its constants' tensors.
        regions: the graph's regions.
        target: the device that it will run on.
        extra_engines: extra engines as `id=module:Class`.

    Raises:
        PlanError: a step that fits no region of the graph, or reads a value that no earlier step makes.
        CompileError: an engine could not build.
    """
    graph = captured.graph
    slots = {name: index for index, name in enumerate(graph.inputs)}
    steps: list[BoundStep] = []
    packed: dict[tuple[object, ...], tuple[Executable, Packed]] = {}
    for index, step in enumerate(plan.steps):
        missing = [name for name in step.args if name not in slots]
        if missing:
            raise PlanError(f"steps[{index}].args", missing[0], "a value that an earlier step makes")
        constants = _constants(index, step, captured, regions)
        key = (step.problem, step.config, step.layout, tuple(id(c) for c in constants))
        if key not in packed:
            problem = _problem(index, step, captured, regions)
            engine = load_engine(step.config.engine, extra_engines)
            executable = engine.build(problem, step.config.knobs, target)
            packed[key] = (executable, executable.pack(constants))
        executable, weights = packed[key]
        for name in step.results:
            slots.setdefault(name, len(slots))
        steps.append(
            BoundStep(
                step=step,
                executable=executable,
                constants=weights,
                args=tuple(slots[name] for name in step.args),
                results=tuple(slots[name] for name in step.results),
                specs=tuple(graph.values[name.partition("@")[0]].spec for name in step.results),
            )
        )
    outputs = [_output_slot(name, plan, slots) for name in graph.outputs]
    mark_frees(steps, outputs)
    return Bound(
        steps=steps,
        slot_names=list(slots),
        inputs=[(graph.values[name].spec, plan.border.get(name, ANY_LAYOUT)) for name in graph.inputs],
        outputs=outputs,
        workspace_bytes=max((b.executable.workspace_bytes for b in steps), default=0),
        resident_bytes=sum(executable.resident_bytes(weights) for executable, weights in packed.values()),
    )


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


def mark_frees(steps: list[BoundStep], outputs: list[int]) -> None:
    """Note at each step the slots whose last use it is, so that their memory goes back at once."""
    kept = set(outputs)
    for bound in reversed(steps):
        touched = {*bound.args, *bound.results} - kept
        bound.frees = tuple(sorted(touched))
        kept |= touched
