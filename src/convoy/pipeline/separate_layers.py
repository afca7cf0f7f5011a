"""Tuning of a model that cannot be captured: each Conv2d and Linear by itself, inside a copy of the stock module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.capture import find_modules
from convoy.capture.copies import copy_sharing_tensors
from convoy.capture.find_layers import FoundModule
from convoy.deadline import Deadline
from convoy.errors import CaptureError
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.rounding import fixed_seed
from convoy.pipeline.isolation import IsolatedCopy, isolate, overrides_train
from convoy.pipeline.observer import Observer
from convoy.pipeline.optimize_result import NO_GRAPH, OptimizeResult
from convoy.pipeline.summarize import summarize_layers
from convoy.pipeline.whole_model import tune_whole
from convoy.plan.plan import Plan
from convoy.program import OptimizedModule, Program
from convoy.program.program_cache import Tuner
from convoy.settings import Settings


def optimize_layers(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    settings: Settings,
    observer: Observer,
    tuner_of: Callable[[str, Settings], Tuner],
    reason: str,
    deadline: Deadline,
) -> OptimizeResult:
    """Tune every convolution and linear layer by itself and replace the stock layers in a copy of the model.

    The copy has the stock module's own parameters and buffers, so a call of it changes buffers and arguments as a call of the
    stock module does. It is kept only if its results are right and it is faster end to end.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        name: the user's name for it.
        settings: effort, limits and what is allowed.
        observer: called with the progress.
        tuner_of: (name, settings) → makes programs for further arguments of a layer.
        reason: why the model cannot be captured.
        deadline: when the call must end; each layer may take an equal part of what is left.

    Raises:
        CaptureError: no layer could be tuned, or the copy is not faster; with `reason`.
        Exception: the model raises it when it is called with these arguments.
    """
    found = _layers(model, args, kwargs, reason)
    optimized = _sharing_copy(model, reason)
    results = _tuned_layers(optimized, found.layers, name, settings, observer, tuner_of, deadline)
    if all(result.plan.baseline for result in results.values()):
        raise CaptureError(reason)

    def copies() -> tuple[IsolatedCopy, IsolatedCopy]:
        stock, trial = isolate(model, args, kwargs), isolate(model, args, kwargs)
        _replace_layers(trial.model, results)
        return stock, trial

    _replace_layers(optimized, results)
    errors = _differences(*copies(), reason)
    least = end_to_end.least_error(str(settings.numerics))
    if not errors.rel_l2_error <= least:
        words = f"with optimized layers the outputs have an error of {errors.rel_l2_error:.1e} (relative L2)"
        raise CaptureError(f"{reason}; {words}")
    stock, trial = copies()
    with torch.no_grad():
        timed = end_to_end.interleave(
            {"torch.eager": _call(stock, copy=found.overwrites), "convoy": _call(trial, copy=found.overwrites)},
            cuda=any(p.is_cuda for p in model.parameters()),
        )
    if not end_to_end.is_faster(timed["convoy"], timed["torch.eager"]):
        raise CaptureError(reason)
    plan = _joint_plan(name, [result.plan for result in results.values()], reason)
    summaries = {path: result.summary for path, result in results.items()}
    summary = summarize_layers(name, summaries, timed, errors, plan, faster=True)
    told = dict.fromkeys(line for result in results.values() for line in result.told)
    return OptimizeResult(LayerwiseModule(optimized, plan), plan, summary, tuple(told))


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers that one call of a model ran, and whether the call wrote to its arguments."""

    layers: list[FoundModule]
    overwrites: bool


def _layers(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> _Layers:
    """Run a copy once that shares no memory with the model, and record its layers.

    Raises:
        CaptureError: the model has no layer that can be tuned, or it writes to its parameters, which further copies share.
    """
    isolated = isolate(model, args, kwargs, share_parameters=False)
    before = [parameter.detach().clone() for parameter in isolated.model.parameters()]
    given, named = isolated.arguments()
    layers = find_modules(isolated.model, given, named)
    if not layers:
        raise CaptureError(reason)
    if not all(map(_same, before, isolated.model.parameters())):
        raise CaptureError(f"{reason}; and the model writes to its parameters when it is called")
    pairs = zip(pytree.tree_leaves((given, named)), pytree.tree_leaves((args, kwargs)), strict=True)
    tensors = [(one, other) for one, other in pairs if isinstance(one, torch.Tensor)]
    return _Layers(layers, not all(_same(one, other) for one, other in tensors))


def _sharing_copy(model: nn.Module, reason: str) -> nn.Module:
    """A copy in evaluation mode, on the model's own parameters and buffers."""
    copy = copy_sharing_tensors(model)
    if any(module.training for module in copy.modules()):
        if any(map(overrides_train, copy.modules())):
            raise CaptureError(f"{reason}; and the model overrides `train` (call .eval() on the model first)")
        with suppress(NotImplementedError):  # the module of an ExportedProgram
            copy.eval()
    return copy


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) if one.shape == other.shape else False


def _tuned_layers(
    model: nn.Module,
    layers: list[FoundModule],
    name: str,
    settings: Settings,
    observer: Observer,
    tuner_of: Callable[[str, Settings], Tuner],
    deadline: Deadline,
) -> dict[str, OptimizeResult]:
    """Results of the layers that can be captured, by qualified name."""
    results: dict[str, OptimizeResult] = {}
    for index, (path, _, example) in enumerate(layers):
        observer(f"tuning {path} by itself", index, len(layers))
        layer, full_name = model.get_submodule(path), f"{name}.{path}"
        try:
            results[path] = tune_whole(
                layer,
                example,
                {},
                name=full_name,
                settings=settings,
                watch=observer,
                tuner=tuner_of(full_name, settings),
                deadline=Deadline(deadline.left_s / (len(layers) - index)),
            )
        except CaptureError:  # for example complex numbers: the layer stays as it is
            continue
    return results


def _replace_layers(model: nn.Module, results: dict[str, OptimizeResult]) -> None:
    """Replace layers by their programs, if those are faster."""
    for path, result in results.items():
        if not result.plan.baseline:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, result.program)


def _call(isolated: IsolatedCopy, *, copy: bool) -> Callable[[], object]:
    """A function that calls the model once, on new copies of its arguments if it overwrites them."""

    def run() -> object:
        args, kwargs = isolated.arguments() if copy else (isolated.args, isolated.kwargs)
        return isolated.model(*args, **kwargs)

    return run


def _differences(stock: IsolatedCopy, trial: IsolatedCopy, reason: str) -> end_to_end.OutputErrors:
    """Errors of the optimized module's outputs against the stock module's, from the same state and random numbers.

    Raises:
        CaptureError: their number or shapes differ, for example because rounding changes which objects a detector finds.
    """
    outputs: list[list[torch.Tensor]] = []
    for isolated in (stock, trial):
        with torch.no_grad(), fixed_seed():
            outputs.append(end_to_end.float_outputs(isolated.model(*isolated.args, **isolated.kwargs)))
    theirs, mine = outputs
    if [t.shape for t in theirs] != [t.shape for t in mine]:
        raise CaptureError(f"{reason}; with optimized layers its outputs have other shapes")
    return end_to_end.errors_against(mine, [tensor.double() for tensor in theirs])


class LayerwiseModule(OptimizedModule):
    """A model whose layers were optimized one by one. It runs for any shape that its layers accept."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__(model, Program(plan, None, None), (), {}, _no_tuner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model with its optimized layers."""
        return self.model(*args, **kwargs)


def _joint_plan(name: str, parts: list[Plan], reason: str) -> Plan:
    """A plan that shows the layers' totals and notes. It has no steps: they cannot be replayed on the whole model."""
    note = "the model could not be captured, so each layer was optimized by itself: " + reason.splitlines()[0]
    return dataclasses.replace(
        parts[0],
        model=name,
        graph_digest=NO_GRAPH,
        steps=(),
        baseline=True,
        solver="modules",
        total_us=sum(part.total_us for part in parts),
        bound_us=sum(part.bound_us for part in parts),
        predicted=any(part.predicted for part in parts),
        notes=(note, *dict.fromkeys(line for part in parts for line in part.notes)),
    )


def _no_tuner(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None) -> Program:
    del model, args, kwargs, plan
    raise CaptureError("this model cannot be exported: its layers were optimized one by one, for the given shapes")
