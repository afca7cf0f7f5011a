"""export: from a module and its plan to one file that runs without them."""

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
from convoy.deadline import Deadline
from convoy.errors import InputError, PlanError
from convoy.graph.text import digest
from convoy.package.archive import check_path
from convoy.package.export_time import time_for_plan
from convoy.package.plan_choice import baseline_plan, is_portable, portable_plan
from convoy.package.plan_regions import plan_regions
from convoy.package.tensor_file import as_stored
from convoy.package.write import BoundNet, ModelInfo
from convoy.package.write_checked import write_checked
from convoy.pipeline.captured_net import captured_net
from convoy.pipeline.isolation import isolate, preserve_global_state
from convoy.pipeline.model_arguments import checked_model
from convoy.pipeline.net import Net
from convoy.pipeline.optimize import optimize_model
from convoy.pipeline.optimize_result import NO_GRAPH
from convoy.pipeline.plan_target import check_target, device_of, target_for
from convoy.pipeline.tune_in_time import overrun_note
from convoy.plan import Plan
from convoy.program import OptimizedModule, bind
from convoy.program.call_forms import checked_arguments
from convoy.program.verification.verify_plan import verify_plan
from convoy.settings import Numerics, Settings, checked_settings
from convoy.user_warning import warn_user

Arguments = tuple[Any, ...] | list[Any] | torch.Tensor
"""Arguments of one call."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A program to be exported: its plan, and arguments of its shapes. Without a plan one is chosen.

    `plan_was_given` is false for a plan of an optimized module, and for one that is tuned here.
    """

    plan: Plan | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan_was_given: bool = False


def export(
    model: nn.Module,
    path: str | Path,
    args: Arguments | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    more_args: Sequence[tuple[Any, ...]] = (),
    plan: str | Path | Plan | None = None,
    portable: bool = False,
    settings: Settings | None = None,
    name: str = "",
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] = ((), ()),
) -> Path:
    """Write a module as one file, which `convoy.open` and `convoy run` take without the module.

    The file holds the graph, the plan, the weights as the kernels read them, and the compiled kernels. It is for the device that
    the module is on. For a GPU it holds the plan's recorded CUDA graph: each step is a kernel of Convoy's own or a run of cuDNN.

    Args:
        model: a module in evaluation mode, or what `convoy.optimize` returned: then its plans are exported, one program for
            each set of shapes.
        path: the file to write, usually `NAME.convoy`. An existing file is replaced when the new one is complete.
        args: example inputs; needed unless `model` is an optimised module.
        kwargs: example keyword inputs.
        more_args: further example inputs, such as other batch sizes: the package gets a program for each, and the weights once.
            An optimised module gives its own plan for each of these shapes; it is tuned for those that it has none for.
        plan: a plan, or the file of one, to be used in place of tuning.
        portable: use only Convoy's own kernels. On a CPU the C runtime (`libconvoy`) runs no other packages. On a GPU it runs
            all, and others may need cuDNN; a plan with PyTorch's kernels is refused.
        settings: for tuning, if there is no plan. `time_s` bounds the whole call, with all its programs.
        name: name of the model in the package; its class name by default.
        normalisation: mean and standard deviation of each channel, by which `convoy run` normalises images.

    Returns:
        The path.

    Raises:
        InputError: arguments that do not fit, a path that cannot be written, or layers without a kernel of Convoy's own.
        PlanError: the plan is for another model, shape or machine.
        CaptureError: the module cannot be captured as one graph.
        CompileError: the kernels could not be compiled.
    """
    options = checked_settings(settings)
    deadline = Deadline(options.time_s)
    check_path(Path(path))
    stock = model.stock if isinstance(model, OptimizedModule) else checked_model(model)
    plan = plan if plan is None or isinstance(plan, Plan) else plans.load(Path(plan))
    if more_args and (args is None or plan is not None):
        raise InputError("more_args", len(more_args), "args and no plan", "Export what `convoy.optimize` returned.")
    with preserve_global_state():
        tune = partial(_requests, model, stock, plan=plan, settings=options, name=name, portable=portable)
        calls = (args, *more_args)
        shares = (time_for_plan(deadline, left) for left in range(len(calls), 0, -1))
        requests = [one for given, until in zip(calls, shares, strict=True) for one in tune(given, kwargs, until=until)]
        nets = _bound_nets(stock, requests, options, deadline, portable=portable)
        shown = name or next((one.plan.model for one in requests if one.plan is not None), "") or type(stock).__name__
        info = ModelInfo(shown, nets[0].target, *normalisation)
        write_checked(Path(path), nets, info, portable=portable)
    _warn_if_late(deadline)
    return Path(path)


def _warn_if_late(deadline: Deadline) -> None:
    late = overrun_note(deadline, measured=1)
    if late:
        warn_user(late)


def _requests(
    model: nn.Module,
    stock: nn.Module,
    args: Arguments | None,
    kwargs: dict[str, Any] | None,
    *,
    plan: Plan | None,
    settings: Settings,
    name: str,
    until: Deadline,
    portable: bool,
) -> list[_Request]:
    """The programs to be exported for a call; tuned until then, if there is no plan."""
    if args is None:
        if not isinstance(model, OptimizedModule):
            raise InputError("args", None, "example inputs", "Pass them as a tuple: (x,).")
        found = [(cached.program.plan, *cached.example.zeros()) for cached in model.program_cache.tuned.values()]
        for own, *_ in found:
            if plan is None and own.graph_digest == NO_GRAPH:
                raise _no_graph(own, given=False)
        kept = [own if not portable or is_portable(own) else None for own, _, _ in found]
        return [
            _Request(plan or own, given, named, plan is not None)
            for own, (_, given, named) in zip(kept, found, strict=True)
        ]
    given, named = checked_arguments(stock, args, kwargs)
    plan_was_given = plan is not None
    if plan is None:
        known = model.program_cache.find(given, named) if isinstance(model, OptimizedModule) else None
        if known is not None and (not portable or is_portable(known[0].program.plan)):
            plan = known[0].program.plan
        elif not portable and device_of(stock, given, named) == "cpu":
            found = optimize_model(
                stock, given, kwargs=named, settings=settings, name=name, deadline=until, improving=True
            )
            plan = found.program.programs[0].plan
    return [_Request(plan, given, named, plan_was_given)]


def _no_graph(plan: Plan, *, given: bool) -> InputError:
    """The error for a model that is not one graph, which names the plan only if the user gave one."""
    todo = "Export one of its modules from Python: convoy.export(model.backbone, 'backbone.convoy', (x,))."
    if given:
        return PlanError("plan", plan.model, "a plan of a model that is one graph", todo)
    reason = "".join(f"{note}. " for note in plan.notes[:1])
    return InputError("model", plan.model, "a model that can be captured as one graph", reason + todo)


def _bound_nets(
    model: nn.Module, requests: Sequence[_Request], settings: Settings, deadline: Deadline, *, portable: bool
) -> list[BoundNet]:
    """A bound plan for each request; those that have none share the time that is left."""
    return [
        _bound_net(model, request, settings, deadline, len(requests) - index, portable=portable)
        for index, request in enumerate(requests)
    ]


def _bound_net(
    model: nn.Module, request: _Request, settings: Settings, deadline: Deadline, waiting: int, *, portable: bool
) -> BoundNet:
    """Capture the module again, for its weights, and bind the plan; `waiting` programs are not bound yet, with this one."""
    target = target_for(device_of(model, request.args, request.kwargs))
    plan = request.plan
    numerics = settings.numerics if plan is None else Numerics(plan.numerics)
    if plan is not None:
        check_target(plan, target)
        if plan.graph_digest == NO_GRAPH:
            raise _no_graph(plan, given=request.plan_was_given)
    whole = dataclasses.replace(settings, numerics=numerics, only_engines=(), deny_engines=())
    begin_s = deadline.spent_s
    net = captured_net("" if plan is None else plan.model, isolate(model, request.args, request.kwargs), whole, target)
    if target.device == "cpu":
        constants = {name: as_stored(tensor) for name, tensor in net.captured.constants.items()}
        net = dataclasses.replace(net, captured=dataclasses.replace(net.captured, constants=constants))
    until = time_for_plan(deadline, waiting, deadline.spent_s - begin_s)
    plan = _checked_plan(net, plan, settings, until, portable=portable)
    with torch.no_grad():
        known = {**plan_regions(net.captured.graph, plan, {}), **net.regions_by_nodes}
        bound = bind(plan, net.captured, known, target, settings.engines)
    assert bound.plan is not None
    regions = verify_plan(bound.plan, net.captured.graph, known, target, ask_engines=False).regions
    return BoundNet(net.captured, bound, regions, target)


def _checked_plan(net: Net, plan: Plan | None, settings: Settings, until: Deadline, *, portable: bool) -> Plan:
    """The plan to be bound: the one given, PyTorch's own operators where tuning found nothing faster, or a portable one."""
    found = digest(net.captured.graph)
    if plan is None or (portable and plan.baseline):
        return portable_plan(net, settings, until, portable=portable)
    if plan.graph_digest != found:
        raise PlanError("plan", plan.graph_digest, f"a plan of this model, digest {found}", "Tune the model again.")
    if plan.baseline:
        return baseline_plan(net, plan)
    if net.target.device == "cpu" and any(step.stream for step in plan.steps):
        raise PlanError("plan", plan.model, "a plan on one stream")
    return plan
