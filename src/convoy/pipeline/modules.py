"""What is left for a model that cannot be exported: each Conv2d and Linear by itself, inside the stock module."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from convoy.capture import find_modules
from convoy.errors import CaptureError
from convoy.pipeline import verdict
from convoy.pipeline.stages import Observer
from convoy.pipeline.summarize import summarize_modules
from convoy.plan.plan import Plan
from convoy.program import OptimizedModule, Program
from convoy.settings import Settings

if TYPE_CHECKING:
    from convoy.pipeline.optimize import Result


def optimize_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    settings: Settings,
    observer: Observer,
    reason: str,
) -> Result:
    """Tune every convolution and linear layer by itself and put it in the place of the stock one.

    The swapped module is a copy whose parameters are the stock module's own. It is kept only where it is faster end to
    end. The user is told by a note.

    Raises:
        CaptureError: the model holds no layer that could be tuned.
    """
    from convoy.pipeline.optimize import Result, optimize_model

    layers = find_modules(model, args, kwargs)
    if not layers:
        raise CaptureError(f"{name} cannot be exported and holds no Conv2d or Linear to optimise by itself: {reason}")
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    swapped = copy.deepcopy(model, shared)
    results: list[tuple[str, Result]] = []
    for index, (path, layer, example) in enumerate(layers):
        observer(f"tuning {path} by itself", index, len(layers))
        result = optimize_model(layer, example, name=f"{name}.{path}", settings=settings)
        results.append((path, result))
        if not result.plan.baseline:
            parent, _, leaf = path.rpartition(".")
            setattr(swapped.get_submodule(parent), leaf, result.program)
    note = "the model could not be exported, so each layer was optimised by itself: " + reason.splitlines()[0]
    with torch.no_grad():
        timed = verdict.interleave(
            {"torch.eager": lambda: model(*args, **kwargs), "convoy": lambda: swapped(*args, **kwargs)},
            cuda=any(p.is_cuda for p in model.parameters()),
        )
    faster = verdict.is_faster(timed["convoy"], timed["torch.eager"])
    kept = swapped if faster else model
    plan = _joint_plan(name, [result.plan for _, result in results], note, baseline=not faster)
    with torch.no_grad():
        errors = verdict.errors_against(
            kept(*args, **kwargs), [t.double() for t in verdict.float_outputs(model(*args, **kwargs))]
        )
    summary = summarize_modules(
        name, {path: result.summary for path, result in results}, timed, errors, plan, faster=faster
    )
    module = SwappedModule(kept, plan)
    return Result(module, plan, summary)


class SwappedModule(OptimizedModule):
    """A model whose layers were swapped one by one: it runs as it is, for any shape that its layers take."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__(model, Program(plan, None, None), (), {}, _no_tuner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model with its swapped layers."""
        return self.model(*args, **kwargs)


def _joint_plan(name: str, parts: list[Plan], note: str, *, baseline: bool) -> Plan:
    """A plan for people to read: the layers' totals and notes. Its steps cannot be replayed on the whole model."""
    first = parts[0]
    return dataclasses.replace(
        first,
        model=name,
        graph_digest="0" * 16,
        steps=(),
        baseline=True,
        solver="baseline" if baseline else "modules",
        total_us=sum(part.total_us for part in parts),
        bound_us=sum(part.bound_us for part in parts),
        notes=(note, *dict.fromkeys(line for part in parts for line in part.notes)),
    )


def _no_tuner(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None) -> Program:
    del model, args, kwargs, plan
    raise CaptureError("this model cannot be exported: its layers were optimised one by one for the shapes given")
