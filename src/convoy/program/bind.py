"""From a plan to a bound plan: executables are built, constants packed, and value names turned into slot numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
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
from convoy.graph.ir import Graph
from convoy.measurement.processes.parallel_compile import ParallelCompile
from convoy.measurement.processes.threaded_builds import Built, built_in_threads
from convoy.plan.describe import title
from convoy.plan.plan import Plan, Step
from convoy.problem import ANY_LAYOUT, EngineConfig, Problem, layout_beside, volume_layout
from convoy.program.adapted_executables import adapted, packed_constants
from convoy.program.bound_plan import BoundPlan, BoundStep
from convoy.program.concat_in_place import with_results_in_place
from convoy.program.lifetimes import with_frees
from convoy.program.shared_memory import present_memory
from convoy.program.verification.usable_config import on_baseline
from convoy.program.verification.verify_plan import Regions, verify_plan
from convoy.program.zero_marks import with_zero_marks
from convoy.regions import Region
from convoy.target import Target
from convoy.tuning_profile import phase
from convoy.user_warning import warn_user

PATIENCE_S: Final = 2.0
"""Seconds of building after which the rest may be compiled in other processes. With full caches a whole net takes less."""

SEEN: Final = 3
"""The last builds, whose median predicts the next one. The first build of an engine also imports its compiler, which takes
seconds with full caches."""

StepKey = tuple[object, ...]
"""Steps with equal keys have equal executables and packed constants."""

PackedSteps = dict[StepKey, tuple[Executable, Packed]]
"""Executables with their packed constants, by key. Plans that differ in the schedule only share them."""


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
    """Verify that the plan computes the graph (`verify_plan`), then build every executable and pack its constants.

    Args:
        plan: a plan of this graph (the caller has compared digests).
        captured: the graph and its constants' tensors.
        regions: the graph's regions.
        target: the device to run on.
        extra_engines: extra engines as `id=module:Class`.
        packed: executables and constants built before for this net; added to.
        ahead: compiles the rest in other processes if building one by one takes long.
        tuned: this process chose the configs from those that the engines offer, so it need not ask the engines again.

    Raises:
        PlanError: the plan does not compute the graph.
        CompileError: the baseline could not be built. If another engine could not, its steps run on the baseline, with a note.
    """
    packed = {} if packed is None else packed
    with phase("verify plan"):
        verified = verify_plan(plan, captured.graph, regions, target, extra_engines, ask_engines=not tuned)
    plan, problems = verified.plan, list(verified.problems)
    constants = [_constants(captured, region) for region in verified.regions]
    keys = [step_key(step, given) for step, given in zip(plan.steps, constants, strict=True)]
    builds = _Builds(problems, constants, packed, target, extra_engines)
    failed = builds.build(plan.steps, keys, ahead)
    if failed:
        plan = _on_baseline_where(failed, plan, problems, keys, target)
        keys = [step_key(step, given) for step, given in zip(plan.steps, constants, strict=True)]
        builds.build(plan.steps, keys, None)
    slots = _slots(captured.graph.inputs, plan.steps)
    made = {result: step.layout for step in plan.steps for result in step.results}
    outputs = [_output_slot(name, plan, made, slots, captured.graph) for name in captured.graph.outputs]
    executables = [
        adapted(packed[key][0], problem, region, captured.graph)
        for key, problem, region in zip(keys, problems, verified.regions, strict=True)
    ]
    weights = [packed[key][1] for key in keys]
    steps: Sequence[BoundStep] = _bound_steps(plan.steps, executables, weights, slots, captured.graph)
    steps = with_results_in_place(steps, problems, outputs)
    steps, slot_names = with_zero_marks(steps, list(slots))
    steps = with_frees(steps, outputs)
    values = captured.graph.values
    return BoundPlan(
        steps=steps, slot_names=slot_names,
        inputs=tuple((values[name].spec, plan.border.get(name, ANY_LAYOUT)) for name in captured.graph.inputs),
        outputs=tuple(outputs),
        workspace_bytes=max((bound.executable.workspace_bytes for bound in steps), default=0),
        resident_bytes=sum(executable.resident_bytes(given) for executable, given in packed.values()),
        plan=plan,
    )  # fmt: skip


def _bound_steps(
    steps: Sequence[Step],
    executables: Sequence[Executable],
    constants: Sequence[Packed],
    slots: Mapping[str, int],
    graph: Graph,
) -> tuple[BoundStep, ...]:
    return tuple(
        BoundStep(
            step=_with_layout_of_volumes(step, graph),
            executable=executable,
            constants=packed,
            args=tuple(slots[name] for name in step.args),
            results=tuple(slots[name] for name in step.results),
            specs=tuple(graph.values[name.partition("@")[0]].spec for name in step.results),
        )
        for step, executable, packed in zip(steps, executables, constants, strict=True)
    )


def _with_layout_of_volumes(step: Step, graph: Graph) -> Step:
    """A step that reads or makes volumes names their layout, also where its problem is a 2-D convolution."""
    names = [name.partition("@")[0] for name in (*step.args, *step.results)]
    volumes = any(len(graph.values[name].spec.shape) == 5 and graph.has_layout(name) for name in names)
    return replace(step, layout=volume_layout(step.layout)) if volumes else step


def _slots(inputs: Sequence[str], steps: Sequence[Step]) -> dict[str, int]:
    """A slot for each input and for each value that a step makes, by name."""
    slots = {name: index for index, name in enumerate(inputs)}
    for step in steps:
        for name in step.results:
            slots.setdefault(name, len(slots))
    return slots


def step_key(step: Step, constants: Sequence[torch.Tensor]) -> StepKey:
    """Steps with equal keys have equal executables and packed constants."""
    return (step.problem, step.config, step.layout, tuple(id(constant) for constant in constants))


@dataclass(frozen=True, slots=True)
class _Builds:
    """Builds executables for steps, and packs their constants.

    Attributes:
        problems: the problem of each step.
        constants: tensors of each step's constants.
        packed: executables and constants by key; added to.
        target: the device.
        extra_engines: extra engines as `id=module:Class`.
    """

    problems: Sequence[Problem]
    constants: Sequence[Sequence[torch.Tensor]]
    packed: PackedSteps
    target: Target
    extra_engines: tuple[str, ...]

    def build(
        self, steps: Sequence[Step], keys: Sequence[StepKey], ahead: ParallelCompile | None
    ) -> dict[StepKey, CompileError]:
        """Build and pack all that is missing: in threads where engines allow it, the others one by one.

        If that takes long, other processes compile the rest first.

        Returns:
            Errors of compilation, by key. An error of the baseline is raised.
        """
        first = {key: index for index, key in reversed(list(enumerate(keys))) if key not in self.packed}
        missing = sorted(first.items(), key=lambda item: (self._in_threads(steps[item[1]]), item[1]))
        wanted = [(self.problems[index], steps[index].config) for _, index in missing]
        begun = None if ahead is None else ahead.begun
        with built_in_threads(wanted, self.target, self.extra_engines, begun) as built:
            return self._build(steps, missing, built, ahead)

    def _in_threads(self, step: Step) -> bool:
        """Whether threads may build a step; such steps come after those that are built here in the meantime."""
        return load_engine(step.config.engine, self.extra_engines).builds_in_threads

    def _build(
        self,
        steps: Sequence[Step],
        missing: Sequence[tuple[StepKey, int]],
        built: Mapping[int, Future[Built]],
        ahead: ParallelCompile | None,
    ) -> dict[StepKey, CompileError]:
        failed: dict[StepKey, CompileError] = {}
        memory = present_memory()
        clock = [time.monotonic()]
        for done, (key, index) in enumerate(missing):
            if ahead is not None and done >= SEEN and clock[-1] - clock[0] > PATIENCE_S:
                rest = [
                    (self.problems[i], steps[i].config)
                    for at, (_, i) in enumerate(missing)
                    if at >= done and at not in built
                ]
                lately = [after - before for before, after in pairwise(clock[-SEEN - 1 :])]
                if ahead.build(rest, median(lately)):
                    ahead = None
            config = steps[index].config
            try:
                with phase("build", "in threads" if done in built else config.engine):
                    executable = self._executable(index, config, built.get(done))
                    given = packed_constants(executable, self.problems[index], self.constants[index])
                    self.packed[key] = (executable, given if memory is None else memory.weights.shared(given))
            except CompileError as error:
                if config.engine == BASELINE:
                    raise
                failed[key] = error
            clock.append(time.monotonic())
        return failed

    def _executable(self, index: int, config: EngineConfig, built: Future[Built] | None) -> Executable:
        """The executable that a thread builds, or one that is built here."""
        made = None if built is None else built.result()
        if isinstance(made, CompileError):
            raise made
        if made is not None:
            return made
        return build(load_engine(config.engine, self.extra_engines), self.problems[index], config.knobs, self.target)


def _on_baseline_where(
    failed: Mapping[StepKey, CompileError],
    plan: Plan,
    problems: list[Problem],
    keys: Sequence[StepKey],
    target: Target,
) -> Plan:
    """A plan with the baseline in the steps that could not be compiled, with notes; warns too. Updates `problems`."""
    steps, notes = list(plan.steps), list(plan.notes)
    for index, (step, key) in enumerate(zip(plan.steps, keys, strict=True)):
        if key in failed:
            error = failed[key]
            steps[index], problems[index] = on_baseline(index, step, problems[index], target, error.summary)
            notes.append(f"PyTorch runs {title(step)}, because {step.config.engine} cannot: {error.summary}")
    names = ", ".join(sorted({error.engine for error in failed.values()}))
    first = next(iter(failed.values())).summary
    warn_user(
        f"PyTorch runs {sum(key in failed for key in keys)} steps, because {names} could not be compiled ({first}). "
        "Repair the compiler, or tune the model again."
    )
    return replace(plan, steps=tuple(steps), notes=tuple(dict.fromkeys(notes)))


def _constants(captured: Captured, region: Region | None) -> list[torch.Tensor]:
    return [] if region is None else [captured.constants[name] for name in region.constants]


def _output_slot(name: str, plan: Plan, made: Mapping[str, str], slots: Mapping[str, int], graph: Graph) -> int:
    """The slot that holds an output in the memory format that the caller gets.

    Args:
        name: of the output.
        plan: its border says what the caller gets.
        made: layouts of the steps that make the values.
        slots: by value.
        graph: knows the rank.
    """
    rank = len(graph.values[name].spec.shape)
    wanted = plan.border.get(name, ANY_LAYOUT)
    for slot_name in (f"{name}@{wanted}", name):
        layout = made.get(slot_name)
        fits = layout is None or wanted in (ANY_LAYOUT, layout_beside(layout, rank))
        if slot_name in slots and fits:
            return slots[slot_name]
    raise PlanError("steps", name, f"a step that makes this output in layout {wanted}")
