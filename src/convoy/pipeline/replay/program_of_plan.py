"""A program from a saved plan: the model is captured, the plan is checked against it, and its kernels are built."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from convoy.capture.user_hooks import user_hook
from convoy.errors import PlanError
from convoy.pipeline.captured_net import captured_net
from convoy.pipeline.isolation import isolate
from convoy.pipeline.optimize_result import NO_GRAPH
from convoy.pipeline.plan_target import check_target, device_of, target_for, warn_of_changes
from convoy.plan import Plan
from convoy.program import Program, build_program
from convoy.settings import Effort, Numerics, Settings
from convoy.user_warning import warn_user


def why_no_program(model: nn.Module) -> str:
    """Why no program can replace the model in its present state; empty if one can."""
    hook = user_hook(model)
    return f"{hook}, which a program would not call (remove it, or call optimize before adding it)" if hook else ""


def program_of_plan(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> Program:
    """Bind a saved plan to a model, after checking that it is for this model, shape and target."""
    target = target_for(device_of(model, args, kwargs))
    check_target(plan, target)
    hook = why_no_program(model)
    if hook:
        warn_user(f"{hook}: PyTorch runs {plan.model} as it is")
    if hook or plan.graph_digest == NO_GRAPH:
        return Program(dataclasses.replace(plan, baseline=True, steps=()), None, None)
    # Regions of all engines' patterns: the plan has made its choice.
    every_engine = dataclasses.replace(
        settings, numerics=Numerics(plan.numerics), only_engines=(), deny_engines=(), effort=Effort.FULL
    )
    net = captured_net(plan.model, isolate(model, args, kwargs), every_engine, target)
    shapes = tuple(str(net.captured.graph.values[name].spec) for name in net.captured.graph.inputs)
    if shapes != plan.inputs:
        raise PlanError("plan.inputs", plan.inputs, f"the shapes given, {shapes}", "Tune for these shapes.")
    program = build_program(plan, net.captured, net.regions_by_nodes, net.target, settings)
    warn_of_changes(plan, program.plan)
    return program
