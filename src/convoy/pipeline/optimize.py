"""optimize and load: from a module to an equal, faster module, or to the stock one where nothing is faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convoy import plan as plans
from convoy.capture.export import evaluation_mode
from convoy.engines.operators import DTYPES
from convoy.errors import CaptureError, PlanError
from convoy.measurement import Peaks, SearchResult
from convoy.measurement.room import memory_limited
from convoy.perfdb import Database
from convoy.pipeline import verdict
from convoy.pipeline.ceilings import ceiling_notes, measured_ceilings
from convoy.pipeline.check import checked, timeline_of
from convoy.pipeline.choice import make_plan, select
from convoy.pipeline.net_check import NetCheck
from convoy.pipeline.proof import Built, proven
from convoy.pipeline.schedules import build_fastest
from convoy.pipeline.stages import (
    Net,
    Observer,
    Stopwatch,
    capture_net,
    check_target,
    device_of,
    measure,
    prediction_notes,
    silent,
    target_for,
    tell_changes,
)
from convoy.pipeline.summarize import summarize
from convoy.plan import Plan
from convoy.problem import TensorSpec
from convoy.program import OptimizedModule, Program, build_program
from convoy.report.summary import Summary
from convoy.settings import Settings, checked_settings
from convoy.target import Target


@dataclass(frozen=True, slots=True)
class Result:
    """What `optimize_model` found.

    Attributes:
        program: the module to use instead of the stock one.
        plan: what it runs.
        summary: everything that was found out, for the report and for `--json`.
    """

    program: OptimizedModule
    plan: Plan
    summary: Summary


def optimize(
    model: nn.Module,
    args: tuple[Any, ...] | torch.Tensor,
    kwargs: dict[str, Any] | None = None,
    *,
    settings: Settings | None = None,
    name: str = "",
) -> OptimizedModule:
    """Make a module that computes what `model` computes, sooner, on the device that it lies on.

    Args:
        model: a module; put in eval mode it gives the results to be matched. It is not changed.
        args: example inputs as a tuple; real ones where possible. Their shapes, dtypes and memory format are tuned for.
        kwargs: example keyword inputs.
        settings: what may be done; `Settings()` by default.
        name: what to call the model in plans and reports; its class name by default.

    Returns:
        A module with the same outputs, and `plan`, `explain()`, `save(path)` and `tune(args)` (another shape) besides.

    Raises:
        InputError: inputs or settings that cannot be used.
        SelectionError: the memory budget is too small for any choice, or with `deterministic` nothing computes an operator with
            the same bits in every run.
    """
    given = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    label = name or type(model).__name__
    return optimize_model(model, given, name=label, settings=checked_settings(settings), kwargs=kwargs).program


def optimize_model(
    model: nn.Module,
    args: tuple[Any, ...],
    *,
    name: str,
    settings: Settings,
    observer: Observer | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Result:
    """`optimize`, with everything that was found out; `observer` is told of the progress."""
    kwargs = kwargs or {}
    watch = observer or silent
    target = target_for(device_of(model, args, kwargs))
    with evaluation_mode(model):
        result = _optimize_model(model, args, kwargs, name, settings, target, watch)
    result.program.renew()  # with the training flags that the user gave
    return result


def _optimize_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    settings: Settings,
    target: Target,
    watch: Observer,
) -> Result:
    try:
        net = capture_net(name, model, args, kwargs, settings, target)
    except CaptureError as error:
        from convoy.pipeline.modules import optimize_modules

        return optimize_modules(model, args, kwargs, name=name, settings=settings, observer=watch, reason=str(error))
    limited = memory_limited(target.device, settings.tuning_memory_bytes, isolate=settings.isolate)
    with limited, Database.open(settings.db) as database:
        ceilings = measured_ceilings(target)
        clock = Stopwatch()
        found = measure(net, settings, database, watch)
        job = _Job(model, args, kwargs, net, found, settings, ceilings)
        build = partial(job.build, database, clock, watch)
        return job.conclude(proven(build, net, found, settings, database, watch))


@dataclass(frozen=True, slots=True)
class _Job:
    """One measured net on the way to its program."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    net: Net
    found: SearchResult
    settings: Settings
    ceilings: Peaks | None

    def build(self, database: Database, clock: Stopwatch, watch: Observer) -> Built:
        """Select, build, and check against float64 and the clock."""
        net, settings = self.net, self.settings
        choice = select(net, self.found, settings)
        notes = [*prediction_notes(self.found), *ceiling_notes(self.ceilings), *database.warnings]
        planned = make_plan(net, choice, settings, notes)
        tuned_s = clock.seconds
        watch("checking the whole net", 0, 0)
        flops = sum(region.problems[0].flops for region in net.regions if len(region.nodes) == 1)
        plan, program, outcome = checked(
            NetCheck(self.model, self.args, self.kwargs, flops=flops, cuda=net.target.device == "cuda"),
            lambda: build_fastest(planned, net, settings, choice.problem),
            lambda found: build_program(found, net.captured, net.regions_by_nodes, net.target, settings, tuned=True),
        )
        least = verdict.least_error(str(settings.numerics))
        wrong = verdict.why_wrong("the outputs'", outcome.errors, outcome.baseline_errors, least)
        return Built(choice, plan, program, outcome, wrong, tuned_s)

    def conclude(self, built: Built) -> Result:
        """Keep the baseline where the program does not win.

        Where only a plan gives the same bits in every run, and that was asked for, the plan stays (`verdict.falls_back`).
        """
        net, settings = self.net, self.settings
        plan, program, outcome = built.plan, built.program, built.outcome
        slow = verdict.why_slow("the whole net", outcome.optimized, outcome.baseline)
        falls_back, note = verdict.falls_back(slow, built.wrong, net.captured.as_pytorch, net.target.device, settings)
        if note:
            plan = dataclasses.replace(plan, notes=(*plan.notes, note))
            program.plan = plan
        if falls_back:
            plan = dataclasses.replace(plan, baseline=True, steps=())
            program = Program(plan, net.captured, None)
            outcome = dataclasses.replace(outcome, optimized=outcome.baseline, errors=outcome.baseline_errors)
        module = OptimizedModule(self.model, program, self.args, self.kwargs, _Tuner(net.name, settings))
        inputs = net.captured.flatten_inputs(self.args, self.kwargs)
        plan, timeline = timeline_of(plan, program, inputs)
        summary = summarize(
            net, self.found, built.choice, plan, program, outcome, settings, built.tuned_s, timeline,
            ceilings=self.ceilings,
        )  # fmt: skip
        return Result(module, plan, summary)


@dataclass(frozen=True, slots=True)
class _Tuner:
    """What an OptimizedModule calls for further shapes (no plan) or for new weights (its plan). It can be pickled."""

    name: str
    settings: Settings

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None) -> Program:
        if plan is not None:
            return _program_for(plan, model, args, kwargs, self.settings)
        return optimize_model(model, args, name=self.name, settings=self.settings, kwargs=kwargs).program.programs[0]


def load(
    model: nn.Module,
    path: str | Path | Sequence[str | Path],
    args: tuple[Any, ...] | torch.Tensor,
    kwargs: dict[str, Any] | None = None,
    *,
    settings: Settings | None = None,
) -> OptimizedModule:
    """Replay a saved plan on a model, measuring nothing.

    Args:
        model: the model that the plan was made for.
        path: the plan's file; several for several shapes, the first for `args`.
        args: inputs of the plan's shapes.
        kwargs: keyword inputs.
        settings: `engines`, `static_outputs` and `db` are used.

    Raises:
        PlanError: the plan is malformed or was made for another model, shape, device or version.
    """
    settings = checked_settings(settings)
    given = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    first = plans.load(Path(paths[0]))
    with evaluation_mode(model):
        program = _program_for(first, model, given, kwargs or {}, settings)
    module = OptimizedModule(model, program, given, kwargs or {}, _Tuner(first.model, settings))
    for further in paths[1:]:
        plan = plans.load(Path(further))
        others = tuple(zeros_of(text, given[0].device) for text in plan.inputs)
        module.add(others, {}, _program_for(plan, model, others, {}, settings))
    return module


def zeros_of(spec: str, device: torch.device) -> torch.Tensor:
    """A tensor of a spec's shape and dtype: what capture needs to see."""
    found = TensorSpec.parse(spec)
    return torch.zeros(found.shape, dtype=DTYPES[found.dtype], device=device)


def _program_for(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> Program:
    """Bind a plan that exists already to a model, after checking that it is for this model, shape and target."""
    device = device_of(model, args, kwargs)
    target = target_for(device)
    check_target(plan, target)
    net = capture_net(plan.model, model, args, kwargs, dataclasses.replace(settings, numerics=plan.numerics), target)
    shapes = tuple(str(net.captured.graph.values[name].spec) for name in net.captured.graph.inputs)
    if shapes != plan.inputs:
        raise PlanError("plan.inputs", plan.inputs, f"the shapes given, {shapes}", "Tune for these shapes.")
    program = build_program(plan, net.captured, net.regions_by_nodes, net.target, settings)
    tell_changes(plan, program.plan)
    return program
