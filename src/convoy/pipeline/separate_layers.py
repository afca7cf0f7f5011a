"""What is left for a model that cannot be captured: each Conv2d and Linear by itself, inside a copy of the stock module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.capture import find_modules
from convoy.capture.copies import copy_sharing_tensors
from convoy.errors import CaptureError
from convoy.pipeline import end_to_end
from convoy.pipeline.isolation import IsolatedCopy, isolate, overrides_train
from convoy.pipeline.net import Observer
from convoy.pipeline.optimize_result import NO_GRAPH, OptimizeResult
from convoy.pipeline.rounding import fixed_seed
from convoy.pipeline.summarize import summarize_layers
from convoy.plan.plan import Plan
from convoy.program import OptimizedModule, Program
from convoy.settings import Settings

if TYPE_CHECKING:
    from convoy.capture.find_layers import FoundModule


def optimize_layers(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    settings: Settings,
    observer: Observer,
    reason: str,
) -> OptimizeResult:
    """Tune every convolution and linear layer by itself and put it in the place of the stock one.

    The swapped module is a copy whose parameters and buffers are the stock module's own: what a call of the stock module changes
    in a buffer or in its arguments, a call of the copy changes likewise, once. It is kept only where it is right, and faster end
    to end.

    Raises:
        CaptureError: no layer could be tuned, or nothing is won; with `reason`.
        Exception: the model does not run with these arguments; whatever it raises.
    """
    found = _layers(model, args, kwargs, reason)
    swapped = _sharing_twin(model, reason)
    results = _tuned_layers(swapped, found.layers, name, settings, observer)
    if all(result.plan.baseline for result in results.values()):
        raise CaptureError(reason)

    def copies() -> tuple[IsolatedCopy, IsolatedCopy]:
        stock, trial = isolate(model, args, kwargs), isolate(model, args, kwargs)
        _put(trial.model, results)
        return stock, trial

    _put(swapped, results)
    errors = _differences(*copies(), reason)
    least = end_to_end.least_error(str(settings.numerics))
    if not errors.rel_l2_error <= least:
        words = f"with its layers swapped one by one the outputs are off by {errors.rel_l2_error:.1e}"
        raise CaptureError(f"{reason}; {words}")
    stock, trial = copies()
    with torch.no_grad():
        timed = end_to_end.interleave(
            {"torch.eager": _call(stock, fresh=found.overwrites), "convoy": _call(trial, fresh=found.overwrites)},
            cuda=any(p.is_cuda for p in model.parameters()),
        )
    if not end_to_end.is_faster(timed["convoy"], timed["torch.eager"]):
        raise CaptureError(reason)
    plan = _joint_plan(name, [result.plan for result in results.values()], reason)
    summaries = {path: result.summary for path, result in results.items()}
    summary = summarize_layers(name, summaries, timed, errors, plan, faster=True)
    told = dict.fromkeys(line for result in results.values() for line in result.told)
    return OptimizeResult(LayerwiseModule(swapped, plan), plan, summary, tuple(told))


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers that one call ran, and whether it wrote to its arguments."""

    layers: list[FoundModule]
    overwrites: bool


def _layers(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> _Layers:
    """Run a copy once that shares nothing, not even parameters, and see what it does.

    Raises:
        CaptureError: it holds no layer that can be tuned, or it writes to its parameters, which further copies would share.
    """
    isolated = isolate(model, args, kwargs, share_parameters=False)
    before = [parameter.detach().clone() for parameter in isolated.model.parameters()]
    given, named = isolated.arguments()
    layers = find_modules(isolated.model, given, named)
    if not layers:
        raise CaptureError(reason)
    if not all(map(_same, before, isolated.model.parameters())):
        raise CaptureError(f"{reason}; and it writes to its parameters when it is called")
    pairs = zip(pytree.tree_leaves((given, named)), pytree.tree_leaves((args, kwargs)), strict=True)
    tensors = [(one, other) for one, other in pairs if isinstance(one, torch.Tensor)]
    return _Layers(layers, not all(_same(one, other) for one, other in tensors))


def _sharing_twin(model: nn.Module, reason: str) -> nn.Module:
    """A copy in evaluation mode, on the model's own parameters and buffers."""
    swapped = copy_sharing_tensors(model)
    if any(module.training for module in swapped.modules()):
        if any(map(overrides_train, swapped.modules())):
            raise CaptureError(f"{reason}; and it has a `train` of its own (call .eval() on the model first)")
        with suppress(NotImplementedError):  # the module of an ExportedProgram
            swapped.eval()
    return swapped


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) if one.shape == other.shape else False


def _tuned_layers(
    swapped: nn.Module, layers: list[FoundModule], name: str, settings: Settings, observer: Observer
) -> dict[str, OptimizeResult]:
    """Results of the layers that can be captured, by qualified name."""
    from convoy.pipeline.optimize import tune_whole

    results: dict[str, OptimizeResult] = {}
    for index, (path, _, example) in enumerate(layers):
        observer(f"tuning {path} by itself", index, len(layers))
        layer = swapped.get_submodule(path)
        try:
            results[path] = tune_whole(layer, example, {}, name=f"{name}.{path}", settings=settings, watch=observer)
        except CaptureError:  # e.g. complex numbers: it stays as it is
            continue
    return results


def _put(model: nn.Module, results: dict[str, OptimizeResult]) -> None:
    """Put programs in their layers' places, where they are faster."""
    for path, result in results.items():
        if not result.plan.baseline:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, result.program)


def _call(isolated: IsolatedCopy, *, fresh: bool) -> Callable[[], object]:
    """One call, with fresh copies of arguments that it overwrites."""

    def run() -> object:
        args, kwargs = isolated.arguments() if fresh else (isolated.args, isolated.kwargs)
        return isolated.model(*args, **kwargs)

    return run


def _differences(stock: IsolatedCopy, trial: IsolatedCopy, reason: str) -> end_to_end.OutputErrors:
    """How far the swapped module's outputs are from the stock module's, from the same state and random numbers.

    Raises:
        CaptureError: they are not of the same number and shapes, as where rounding decides what is found in an image.
    """
    outputs: list[list[torch.Tensor]] = []
    for isolated in (stock, trial):
        with torch.no_grad(), fixed_seed():
            outputs.append(end_to_end.float_outputs(isolated.model(*isolated.args, **isolated.kwargs)))
    theirs, mine = outputs
    if [t.shape for t in theirs] != [t.shape for t in mine]:
        raise CaptureError(f"{reason}; with its layers swapped one by one it gives outputs of other shapes")
    return end_to_end.errors_against(mine, [tensor.double() for tensor in theirs])


class LayerwiseModule(OptimizedModule):
    """A model whose layers were swapped one by one: it runs as it is, for any shape that its layers take."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__(model, Program(plan, None, None), (), {}, _no_tuner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model with its swapped layers."""
        return self.model(*args, **kwargs)


def _joint_plan(name: str, parts: list[Plan], reason: str) -> Plan:
    """A plan for people to read: the layers' totals and notes. Its steps cannot be replayed on the whole model."""
    note = "the model could not be captured, so each layer was optimised by itself: " + reason.splitlines()[0]
    return dataclasses.replace(
        parts[0],
        model=name,
        graph_digest=NO_GRAPH,
        steps=(),
        baseline=True,
        solver="modules",
        total_us=sum(part.total_us for part in parts),
        bound_us=sum(part.bound_us for part in parts),
        notes=(note, *dict.fromkeys(line for part in parts for line in part.notes)),
    )


def _no_tuner(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None) -> Program:
    del model, args, kwargs, plan
    raise CaptureError("this model cannot be exported: its layers were optimised one by one for the shapes given")
