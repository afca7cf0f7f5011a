"""load: run a model by a saved plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convoy import plan as plans
from convoy.dynamic.load_sizes import load_sizes
from convoy.errors import InputError
from convoy.pipeline.isolation import preserve_global_state
from convoy.pipeline.model_arguments import checked_model, warn_of_training_parts
from convoy.pipeline.optimize import ModelTuner
from convoy.pipeline.plan_target import arguments_of
from convoy.pipeline.replay.program_of_plan import program_of_plan
from convoy.program import OptimizedModule
from convoy.program.call_forms import checked_arguments
from convoy.settings import Settings, checked_settings


def load(
    model: nn.Module,
    path: str | Path | Sequence[str | Path],
    args: tuple[Any, ...] | list[Any] | torch.Tensor = (),
    kwargs: dict[str, Any] | None = None,
    *,
    settings: Settings | None = None,
) -> OptimizedModule:
    """Run a model by a saved plan, without measuring.

    Args:
        model: the model that the plan was made for.
        path: the plan's file. With several shapes, one file each; the first is for `args`. Plans that a module for ranges of
            sizes has saved are one file; `args` may have any sizes within the ranges.
        args: inputs of the plan's shapes, as a tuple.
        kwargs: inputs by the names of the parameters of the model's `forward`.
        settings: `engines`, `static_outputs` and `db` are used.

    Raises:
        PlanError: the plan is malformed, or was made for another model, shape, device or version.
    """
    stock, options = checked_model(model), checked_settings(settings)
    warn_of_training_parts(stock)
    given, named = checked_arguments(stock, args, kwargs)
    paths = plans.paths_of(path)
    first = plans.load_plans(paths[0])
    with preserve_global_state():
        if isinstance(first, plans.PlansForSizes):
            if len(paths) > 1:
                raise InputError("path", [str(one) for one in paths], "one file of plans for several sizes, alone")
            tuner = ModelTuner(first.programs[0].plan.model, options)
            return load_sizes(stock, first, (given, named), tuner, options.check)
        program = program_of_plan(first, stock, given, named, options)
        module = OptimizedModule(stock, program, given, named, ModelTuner(first.model, options), options.check)
        for further in paths[1:]:
            plan = plans.load(further)
            others = arguments_of(plan, given, named)
            module.add(*others, program_of_plan(plan, stock, *others, options))
    return module
