"""optimize and load: from a module to an equal, faster module, or to the stock one where nothing is faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from convoy import plan as plans
from convoy.capture.user_hooks import user_hook
from convoy.engines.competition import competing_engines
from convoy.engines.torch_operators import DTYPES
from convoy.errors import CaptureError, PlanError
from convoy.measurement import Peaks
from convoy.measurement.device.memory_limit import memory_limited
from convoy.perfdb import Database
from convoy.pipeline import end_to_end
from convoy.pipeline.captured_net import captured_net
from convoy.pipeline.ceilings import ceiling_notes, measure_ceilings
from convoy.pipeline.end_to_end_check import build_and_check, with_timeline
from convoy.pipeline.isolation import IsolatedCopy, isolate, preserve_global_state
from convoy.pipeline.model_arguments import checked_arguments, checked_model, checked_name
from convoy.pipeline.net import (
    Net,
    Observer,
    Stopwatch,
    check_target,
    device_of,
    ignore_progress,
    measure,
    prediction_notes,
    target_for,
    warn_of_changes,
)
from convoy.pipeline.net_check import NetCheck
from convoy.pipeline.optimize_result import NO_GRAPH, OptimizeResult, stock_result
from convoy.pipeline.schedules import build_fastest
from convoy.pipeline.select import make_plan, select, stock_defects
from convoy.pipeline.separate_layers import optimize_layers
from convoy.pipeline.summarize import summarize
from convoy.pipeline.verify_predicted import BuiltPlan, rebuild_until_verified
from convoy.plan import Plan
from convoy.problem import TensorSpec
from convoy.program import OptimizedModule, Program, build_program
from convoy.settings import Numerics, Settings, checked_settings
from convoy.tune import SearchResult
from convoy.user_warning import warn_user


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
    return optimize_model(model, args, name=name, settings=settings, kwargs=kwargs).program


def optimize_model(
    model: nn.Module,
    args: tuple[Any, ...] | torch.Tensor,
    *,
    name: str = "",
    settings: Settings | None = None,
    observer: Observer | None = None,
    kwargs: dict[str, Any] | None = None,
) -> OptimizeResult:
    """`optimize`, with everything that was found out; `observer` is told of the progress."""
    stock, options = checked_model(model), checked_settings(settings)
    given, named = checked_arguments(args, kwargs)
    with preserve_global_state():
        result = _tuned(stock, given, named, checked_name(name, stock), options, observer or ignore_progress)
    for line in result.told:
        warn_user(line)
    return result


def _tuned(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, settings: Settings, watch: Observer
) -> OptimizeResult:
    """The best that there is for a model: a program of the whole, else of its layers one by one, else PyTorch's own run."""
    target = target_for(device_of(model, args, kwargs))
    competing_engines(settings)  # refuses ids that there are not
    reason = _why_not(model)
    if not reason:
        try:
            return tune_whole(model, args, kwargs, name=name, settings=settings, watch=watch)
        except CaptureError as error:
            reason = str(error).partition("\n")[0]
        try:
            return optimize_layers(model, args, kwargs, name=name, settings=settings, observer=watch, reason=reason)
        except CaptureError as error:
            reason = str(error).partition("\n")[0]
    return stock_result(
        model, args, kwargs, name=name, settings=settings, target=target, tuner=_Tuner(name, settings), reason=reason
    )


def _why_not(model: nn.Module) -> str:
    """Why no program can take a model's place, as it is now; empty where one may."""
    hook = user_hook(model)
    return f"{hook}, which a program would not call (remove it, or call optimize before it is added)" if hook else ""


def tune_whole(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, settings: Settings, watch: Observer
) -> OptimizeResult:
    """Tune a model as one graph. Copies are run; the model is not.

    Raises:
        CaptureError: it cannot be copied, captured, or replaced by a graph.
    """
    target = target_for(device_of(model, args, kwargs))
    with memory_limited(target.device, settings.tuning_memory_bytes, isolate=settings.isolate):
        isolated = isolate(model, args, kwargs)
        net = captured_net(name, isolated, settings, target)
        with Database.open(settings.db) as database:
            ceilings = measure_ceilings(target)
            clock = Stopwatch()
            found = measure(net, settings, database, watch)
            job = _Job(model, (args, kwargs), isolated, net, found, settings, ceilings, NetCheck(net, isolated))
            net.original = None  # the check has run it
            build = partial(job.build, database, clock, watch)
            built, found = rebuild_until_verified(build, net, found, settings, database, watch)
            return dataclasses.replace(job, found=found).conclude(built)


@dataclass(frozen=True, slots=True)
class _Job:
    """One measured net on the way to its program."""

    model: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    isolated: IsolatedCopy
    net: Net
    found: SearchResult
    settings: Settings
    ceilings: Peaks | None
    check: NetCheck

    def build(self, database: Database, clock: Stopwatch, watch: Observer, found: SearchResult) -> BuiltPlan:
        """Select, build, and check against float64 and the clock."""
        net, settings = self.net, self.settings
        choice = select(net, found, settings)
        seen = [line for line in (self.check.wrong, self.check.note) if line]
        notes = [*seen, *prediction_notes(found), *ceiling_notes(self.ceilings), *database.warnings]
        planned = make_plan(net, choice, settings, notes)
        tuned_s = clock.seconds
        watch("checking the whole net", 0, 0)
        plan, program, outcome = build_and_check(
            self.check,
            lambda: build_fastest(planned, net, settings, choice.problem),
            lambda plan: build_program(plan, net.captured, net.regions_by_nodes, net.target, settings, tuned=True),
        )
        least = end_to_end.least_error(str(settings.numerics))
        wrong = end_to_end.why_wrong("the outputs'", outcome.errors, outcome.baseline_errors, least)
        return BuiltPlan(choice, plan, program, outcome, wrong, tuned_s)

    def conclude(self, built: BuiltPlan) -> OptimizeResult:
        """Keep the baseline where the program does not win.

        Where only a plan gives the same bits in every run, and that was asked for, the plan stays (`verdict.falls_back`).
        """
        net, settings = self.net, self.settings
        plan, program, outcome = built.plan, built.program, built.outcome
        slow = end_to_end.why_slow("the whole net", outcome.optimized, outcome.baseline)
        stock_wrong = bool(self.check.wrong or stock_defects(net))
        falls_back, note = end_to_end.falls_back(
            slow, built.wrong, net.captured.as_pytorch, net.target.device, settings, stock_wrong
        )
        if note:
            plan = dataclasses.replace(plan, notes=(*plan.notes, note))
            program = program.with_plan(plan)
        if falls_back:
            plan = dataclasses.replace(plan, baseline=True, steps=())
            program = Program(plan, net.captured, None)
            outcome = dataclasses.replace(outcome, optimized=outcome.baseline, errors=outcome.baseline_errors)
        inputs = net.captured.flatten_inputs(self.isolated.args, self.isolated.kwargs)
        program, timeline = with_timeline(program, inputs)
        plan = program.plan
        module = OptimizedModule(self.model, program, *self.given, _Tuner(net.name, settings), settings.check)
        summary = summarize(
            net, self.found, built.choice, plan, program, outcome, settings, built.tuned_s, timeline,
            ceilings=self.ceilings,
        )  # fmt: skip
        return OptimizeResult(module, plan, summary, (self.check.wrong,) if self.check.wrong else ())


@dataclass(frozen=True, slots=True)
class _Tuner:
    """What an OptimizedModule calls for further shapes (no plan) or for new weights (its plan). It can be pickled."""

    name: str
    settings: Settings

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None) -> Program:
        if plan is None:
            result = optimize_model(model, args, name=self.name, settings=self.settings, kwargs=kwargs)
            return result.program.programs[0]
        with preserve_global_state():
            return _program_for(plan, model, args, kwargs, self.settings)


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
    stock, options = checked_model(model), checked_settings(settings)
    given, named = checked_arguments(args, kwargs)
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    first = plans.load(Path(paths[0]))
    with preserve_global_state():
        program = _program_for(first, stock, given, named, options)
        module = OptimizedModule(stock, program, given, named, _Tuner(first.model, options), options.check)
        for further in paths[1:]:
            plan = plans.load(Path(further))
            others = tuple(zeros_of(text, given[0].device) for text in plan.inputs)
            module.add(others, {}, _program_for(plan, stock, others, {}, options))
    return module


def zeros_of(spec: str, device: torch.device) -> torch.Tensor:
    """A tensor of a spec's shape and dtype: what capture needs to see.

    Raises:
        PlanError: a shape that no input has, or that there is no memory for.
    """
    found = TensorSpec.parse(spec)
    try:
        if found.size_bytes <= MOST_INPUT_BYTES:
            return torch.zeros(found.shape, dtype=DTYPES[found.dtype], device=device)
    except (RuntimeError, MemoryError) as error:
        raise PlanError("plan.inputs", spec, "inputs that fit into memory", str(error).split("\n")[0]) from error
    raise PlanError("plan.inputs", spec, f"inputs of at most {MOST_INPUT_BYTES >> 30} GiB")


MOST_INPUT_BYTES: Final = 16 << 30
"""Of an input that a plan's file names: more than a batch of images ever has."""


def _program_for(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> Program:
    """Bind a plan that exists already to a model, after checking that it is for this model, shape and target."""
    target = target_for(device_of(model, args, kwargs))
    check_target(plan, target)
    hook = _why_not(model)
    if hook:
        warn_user(f"{hook}: PyTorch runs {plan.model} as it is")
    if hook or plan.graph_digest == NO_GRAPH:
        return Program(dataclasses.replace(plan, baseline=True, steps=()), None, None)
    # Regions of all engines' patterns: the plan has made its choice.
    whole = dataclasses.replace(settings, numerics=Numerics(plan.numerics), only_engines=(), deny_engines=())
    net = captured_net(plan.model, isolate(model, args, kwargs), whole, target)
    shapes = tuple(str(net.captured.graph.values[name].spec) for name in net.captured.graph.inputs)
    if shapes != plan.inputs:
        raise PlanError("plan.inputs", plan.inputs, f"the shapes given, {shapes}", "Tune for these shapes.")
    program = build_program(plan, net.captured, net.regions_by_nodes, net.target, settings)
    warn_of_changes(plan, program.plan)
    return program
