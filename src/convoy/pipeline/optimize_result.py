"""OptimizeResult: results of tuning a model for inference, also of a model that PyTorch runs as it is."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy._version import __version__
from convoy.capture.draft import spec_of
from convoy.errors import CaptureError
from convoy.plan import Plan
from convoy.program import OptimizedModule, Program
from convoy.program.program_cache import Tuner
from convoy.report.summary import Memory, SelectionSummary, Summary, Timing, Tuning
from convoy.settings import Settings
from convoy.target import Target
from convoy.tuning_profile import TuningProfile

NO_GRAPH: Final = "0" * 16
"""The digest of a plan that no graph was captured for."""


@dataclass(frozen=True, slots=True)
class OptimizeResult:
    """What `optimize_model` found.

    Attributes:
        program: the module to use instead of the stock one.
        plan: what it runs.
        found: the summary, or what reads it (that of a stored plan).
        told: what the user is to be warned of, a line each.
        profile: where the time of the call went.
        measured: number of candidates that were measured.
    """

    program: OptimizedModule
    plan: Plan
    found: Summary | Callable[[], Summary]
    told: tuple[str, ...] = ()
    profile: TuningProfile = field(default_factory=TuningProfile)
    measured: int = 0

    @property
    def summary(self) -> Summary:
        """Everything that was found out, for the report and for `--json`."""
        return self.found if isinstance(self.found, Summary) else self.found()


def stock_result(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    settings: Settings,
    target: Target,
    tuner: Tuner,
    reason: str,
) -> OptimizeResult:
    """The result of a model that cannot be tuned: PyTorch runs it. Nothing was run or timed.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        name: the user's name for it.
        settings: the user's settings.
        target: the device.
        tuner: makes programs for the module that is returned.
        reason: why the model cannot be tuned, and what the user can do about it.
    """
    told = f"{reason}: PyTorch runs {name} as it is"
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    first, inputs = tensors[0], _specs(tensors)
    plan = Plan(
        model=name,
        graph_digest=NO_GRAPH,
        inputs=inputs,
        target=target.to_dict(),
        numerics=str(settings.numerics),
        steps=(),
        solver="baseline",
        baseline=True,
        notes=(told,),
    )
    summary = _unmeasured(plan, first, target)
    module = OptimizedModule(model, Program(plan, None, None), args, kwargs, tuner)
    return OptimizeResult(module, plan, summary, (told,))


def _unmeasured(plan: Plan, first: torch.Tensor, target: Target) -> Summary:
    """The summary of a plan that was not measured, with the first tensor of its inputs."""
    unknown = Timing("torch.eager", 0.0, 0.0)
    return Summary(
        model=plan.model,
        target=target.to_dict(),
        batch=first.size(0) if first.dim() else 0,
        dtype=str(first.dtype).removeprefix("torch."),
        numerics=plan.numerics,
        inputs=plan.inputs,
        baseline=unknown,
        optimized=unknown,
        speedup=1.0,
        rel_l2_error=0.0,
        max_abs_error=0.0,
        baseline_rel_l2_error=0.0,
        tuning=Tuning(0.0, 0, 0),
        memory=Memory(0, 0, 0),
        selection=SelectionSummary("baseline", 0.0, 0.0, 0.0, ()),
        layers=(),
        peaks={},
        notes=plan.notes,
        versions={"convoy": __version__, **dict(target.versions)},
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _specs(tensors: list[torch.Tensor]) -> tuple[str, ...]:
    """Specs of tensors as text; none where one has no spec, as complex and sparse ones."""
    try:
        return tuple(str(spec_of(tensor, "args")) for tensor in tensors)
    except (CaptureError, RuntimeError):  # a nested tensor has no sizes
        return ()
