"""optimize: from a module to a faster one with the same results; the stock module runs if nothing is faster."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from convoy.collection_pause import collection_paused
from convoy.deadline import Deadline
from convoy.dynamic.dims import Call
from convoy.dynamic.read_dynamic import read_dynamic
from convoy.dynamic.tune_sizes import tune_sizes
from convoy.engines.competition import competing_engines
from convoy.errors import CaptureError
from convoy.measurement.device.cudnn_search import cudnn_search
from convoy.pipeline.by_parts.parts import PartsJob, optimize_parts
from convoy.pipeline.ceilings import is_brief
from convoy.pipeline.check.rounding import fixed_seed
from convoy.pipeline.improve import improved
from convoy.pipeline.isolation import isolate, preserve_global_state
from convoy.pipeline.model_arguments import checked_model, checked_name, warn_of_training_parts
from convoy.pipeline.observer import Observer
from convoy.pipeline.optimize_result import OptimizeResult, stock_result
from convoy.pipeline.plan_target import device_of, target_for
from convoy.pipeline.profile_output import profiled
from convoy.pipeline.replay.program_of_plan import program_of_plan, why_no_program
from convoy.pipeline.tune_in_time import overrun_note
from convoy.pipeline.whole_model import tune_whole
from convoy.plan import Plan
from convoy.program import OptimizedModule, Program
from convoy.program.call_forms import checked_arguments
from convoy.progress import shown
from convoy.settings import Settings, checked_settings
from convoy.tuning_profile import phase
from convoy.user_warning import warn_user


def optimize(
    model: nn.Module,
    args: tuple[Any, ...] | list[Any] | torch.Tensor = (),
    kwargs: dict[str, Any] | None = None,
    *,
    settings: Settings | None = None,
    name: str = "",
    dynamic: Any = None,
) -> OptimizedModule:
    """Make a module that computes the same as `model`, faster, on the device that the model is on.

    Args:
        model: a module. Its results in evaluation mode are the reference. It is not changed.
        args: example inputs as a tuple, real data if possible; one tensor stands for a tuple of it. The result is tuned for their
            shapes, dtypes and memory format.
        kwargs: example inputs by the names of the parameters of the model's `forward`, as in `torch.export`. Later calls may give
            each input by position or by name, however the examples were given.
        settings: effort, limits and what is allowed; `Settings()` by default.
        name: name of the model in plans and reports; its class name by default.
        dynamic: sizes that may change, as a range for each dimension, such as `{0: (1, 64)}` for batches of 1 to 64 images, or
            `dynamic_shapes` as torch.export takes them. See docs/how-to/dynamic-sizes.md.

    Returns:
        A module with the same outputs. It also has `plan`, `explain()`, `save(path)` and `tune(args)` (for another shape); with
        `dynamic` also `add_size(sizes)`.

    Raises:
        InputError: inputs or settings that cannot be used.
        SelectionError: the memory budget is too small, or `deterministic` is set and no engine computes an operator
            deterministically.
    """
    warn_of_training_parts(checked_model(model))
    if dynamic is not None:
        return optimize_sizes(model, args, kwargs, dynamic, name=name, settings=settings).program
    return optimize_model(model, args, name=name, settings=settings, kwargs=kwargs).program


def optimize_sizes(
    model: nn.Module,
    args: tuple[Any, ...] | list[Any] | torch.Tensor,
    kwargs: dict[str, Any] | None,
    dynamic: Any,
    *,
    name: str = "",
    settings: Settings | None = None,
    observer: Observer | None = None,
    deadline: Deadline | None = None,
) -> OptimizeResult:
    """`optimize` with `dynamic`: the results for the example's sizes, with a module for all sizes."""
    stock, options = checked_model(model), checked_settings(settings)
    given, named = checked_arguments(stock, args, kwargs)
    dims = read_dynamic(dynamic, stock.forward, given, named)

    def tune(call: Call, until: Deadline) -> OptimizeResult:
        return optimize_model(
            stock, call[0], name=name, settings=options, observer=observer, kwargs=call[1], deadline=until
        )

    run = partial(ModelTuner(name, options).run, stock)
    with preserve_global_state():
        found = tune_sizes(stock, (given, named), dims, run, tune, deadline or Deadline(options.time_s))
    return dataclasses.replace(found.example, program=found.module)


def optimize_model(
    model: nn.Module,
    args: tuple[Any, ...] | list[Any] | torch.Tensor = (),
    *,
    name: str = "",
    settings: Settings | None = None,
    observer: Observer | None = None,
    kwargs: dict[str, Any] | None = None,
    deadline: Deadline | None = None,
    improving: bool = False,
) -> OptimizeResult:
    """`optimize` with all results of tuning.

    Args:
        model: as for `optimize`.
        args: as for `optimize`.
        name: as for `optimize`.
        settings: as for `optimize`.
        observer: called with the progress.
        kwargs: as for `optimize`.
        deadline: when the call must end, if its time began before the call; it may be stopped by another thread. None:
            `settings.time_s` after the call begins.
        improving: the call is part of a longer one, which reports its own overrun.
    """
    stock, options = checked_model(model), checked_settings(settings)
    deadline = deadline or Deadline(options.time_s)
    given, named = checked_arguments(stock, args, kwargs)
    with (
        shown(options.progress and observer is None) as display,
        preserve_global_state(),
        profiled(options) as recorder,
        cudnn_search(device_of(stock, given, named), allowed=not is_brief(options.effort, deadline)),
    ):
        result = _tuned(stock, given, named, checked_name(name, stock), options, observer or display, deadline)
    result = dataclasses.replace(result, profile=recorder.profile())
    late = "" if improving else overrun_note(deadline, result.measured)
    for line in (*result.told, *filter(None, (late,))):
        warn_user(line)
    return result


def _tuned(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    settings: Settings,
    watch: Observer,
    deadline: Deadline,
) -> OptimizeResult:
    """Tune the whole model; if it cannot be captured, its largest modules that can be; else PyTorch runs it."""
    with phase("device and engines"), collection_paused():
        target = target_for(device_of(model, args, kwargs))
        competing_engines(settings)  # raises InputError for unknown ids
    reason = why_no_program(model)
    if not reason:
        try:
            tuner = ModelTuner(name, settings)
            return tune_whole(
                model, args, kwargs, name=name, settings=settings, watch=watch, tuner=tuner, deadline=deadline
            )
        except CaptureError as error:
            reason = str(error).partition("\n")[0]
        try:
            return optimize_parts(
                PartsJob(model, args, kwargs, name, settings, watch, ModelTuner, reason, deadline),
            )
        except CaptureError as error:
            reason = str(error).partition("\n")[0]
    return stock_result(
        model,
        args,
        kwargs,
        name=name,
        settings=settings,
        target=target,
        tuner=ModelTuner(name, settings),
        reason=reason,
    )


@dataclass(frozen=True, slots=True)
class ModelTuner:
    """Makes programs for an OptimizedModule: by tuning for further shapes, or from a plan for new weights. It can be pickled."""

    name: str
    settings: Settings

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None) -> Program:
        """A program of the plan; tuned if the plan is None."""
        if plan is None:
            result = optimize_model(model, args, name=self.name, settings=self.settings, kwargs=kwargs)
            return result.program.programs[0]
        with preserve_global_state():
            return program_of_plan(plan, model, args, kwargs, self.settings)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a copy of the model returns for copies of these arguments. Random numbers are the same in every run."""
        isolated = isolate(model, args, kwargs)
        with torch.no_grad(), fixed_seed():
            return isolated.model(*isolated.args, **isolated.kwargs)

    def within(self, time_s: float) -> ModelTuner:
        """The same, with this wall time for each call, seconds."""
        return ModelTuner(self.name, dataclasses.replace(self.settings, time_s=time_s))

    def improved(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program, time_s: float
    ) -> Program:
        """The best program after `time_s` further seconds of tuning (`convoy.pipeline.improve`)."""

        def tune(settings: Settings, deadline: Deadline) -> OptimizeResult:
            return optimize_model(
                model, args, name=self.name, settings=settings, kwargs=kwargs, deadline=deadline, improving=True
            )

        return improved(program, args, kwargs, self.settings, time_s, tune)
