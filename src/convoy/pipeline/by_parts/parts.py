"""Tuning of a model that cannot be captured whole: its largest modules that can be, inside a copy of the stock module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.capture.copies import copy_sharing_tensors
from convoy.capture.state.call_leftovers import CallLeftovers
from convoy.deadline import Deadline
from convoy.errors import CaptureError
from convoy.pipeline.by_parts.module_calls import ModuleCalls, depends_on_data, module_calls
from convoy.pipeline.by_parts.partwise_module import OptimizedPart, PartwiseModule, replace_modules
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.call_state import left_by_calls
from convoy.pipeline.check.parts_check import check_outputs
from convoy.pipeline.isolation import IsolatedCopy, isolate, overrides_train
from convoy.pipeline.observer import Observer
from convoy.pipeline.optimize_result import NO_GRAPH, OptimizeResult
from convoy.pipeline.summarize import summarize_parts
from convoy.pipeline.whole_model import tune_whole
from convoy.plan.plan import Plan
from convoy.program.program_cache import Tuner
from convoy.settings import Settings
from convoy.tuning_profile import phase

MOST_SHAPES: Final = 8
"""Shapes for which one module gets programs. A module that is called with more is not replaced; the modules inside may be."""

MOST_NAMES: Final = 6
"""Parts that a warning names."""

LONGEST_REASON: Final = 160
"""Characters of the exporter's words that the warning repeats."""


@dataclass(frozen=True, slots=True)
class PartsJob:
    """A model to be tuned by parts, and how.

    Attributes:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        name: the user's name for it.
        settings: effort, limits and what is allowed.
        observer: called with the progress.
        tuner_of: (name, settings) → makes programs for further arguments of a part.
        reason: why the model cannot be captured whole.
        deadline: when the call must end; each part may take its share of what is left.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    settings: Settings
    observer: Observer
    tuner_of: Callable[[str, Settings], Tuner]
    reason: str
    deadline: Deadline


def optimize_parts(job: PartsJob) -> OptimizeResult:
    """Tune the largest modules of a model that can be captured, and replace them in a copy of the model.

    From the top down: a module that can be captured is a part; of one that cannot be, the modules inside are tried. The copy has
    the stock module's own parameters and buffers, so that a call of it changes buffers and arguments as a call of the stock
    module does. It is kept only if its results are right and it is faster end to end.

    Raises:
        CaptureError: no part could be tuned, or the copy is not faster; with the reason.
        Exception: the model raises it when it is called with these arguments.
    """
    with phase("find parts"):
        seen = _recorded(job)
        partwise = _sharing_copy(job.model, job.reason)
    tuned = {part.path: part for part in _tuned_parts(job, partwise, seen)}
    kept = {path: part for path, part in tuned.items() if not part.result.plan.baseline}
    if not kept:
        raise CaptureError(f"{job.reason}; and none of its parts runs faster by a program")
    programs = {path: part.result.program for path, part in kept.items()}

    def copies() -> tuple[IsolatedCopy, IsolatedCopy]:
        stock, trial = (isolate(job.model, job.args, job.kwargs) for _ in range(2))
        replace_modules(trial.model, programs)
        return stock, trial

    summaries = {path: part.result.summary for path, part in kept.items()}
    with phase("check the whole"):
        errors, note = check_outputs(copies, summaries, str(job.settings.numerics), job.reason)
        timed = _timed(job, copies(), overwrites=seen.overwrites)
    if not end_to_end.is_faster(timed["convoy"], timed["torch.eager"]):
        raise CaptureError(f"{job.reason}; and with its parts by programs it is not faster in four of five rounds")
    parts = [OptimizedPart(path, part.share, part.result.program) for path, part in kept.items()]
    replace_modules(partwise, programs)
    told = _told(job, parts)
    plan = _joint_plan(job, [part.result.plan for part in kept.values()], tuple(filter(None, (told, note))))
    leftovers = _leftovers(copies()[0], list(kept))
    module = PartwiseModule(job.model, partwise, parts, plan, copy_sharing_tensors, leftovers)
    summary = summarize_parts(job.name, summaries, timed, errors, plan)
    lines = dict.fromkeys(line for part in kept.values() for line in part.result.told)
    return OptimizeResult(module, plan, summary, (told, *lines), measured=summary.tuning.measured)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One call of a model: its modules' calls, which of them depend on data, and whether it wrote to its arguments."""

    calls: dict[str, ModuleCalls]
    unstable: set[str]
    overwrites: bool

    def share(self, path: str) -> float:
        """A module's share of the model's time, 0..1."""
        whole = self.calls[""].seconds if "" in self.calls else 0.0
        return min(1.0, self.calls[path].seconds / whole) if whole else 0.0

    def may_be_part(self, path: str) -> bool:
        """Whether a module is called, for few shapes, which do not depend on data."""
        called = self.calls.get(path)
        return called is not None and path not in self.unstable and len(called.examples) <= MOST_SHAPES


def _recorded(job: PartsJob) -> _Recorded:
    """Run a copy twice that shares no memory with the model.

    Raises:
        CaptureError: the model writes to its parameters, which further copies share.
    """
    isolated = isolate(job.model, job.args, job.kwargs, share_parameters=False)
    before = [parameter.detach().clone() for parameter in isolated.model.parameters()]
    given, named = isolated.arguments()
    calls = module_calls(isolated.model, given, named)
    if not all(map(_same, before, isolated.model.parameters())):
        raise CaptureError(f"{job.reason}; and the model writes to its parameters when it is called")
    pairs = zip(pytree.tree_leaves((given, named)), pytree.tree_leaves((job.args, job.kwargs)), strict=True)
    tensors = [(one, other) for one, other in pairs if isinstance(one, torch.Tensor)]
    overwrites = not all(_same(one, other) for one, other in tensors)
    return _Recorded(calls, depends_on_data(calls, isolated), overwrites)


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
    """Whether two tensors have the same bits: NaNs, complex numbers and 8-bit floats can be compared so too."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_quantized:
        one, other = one.int_repr(), other.int_repr()
    first, second = (
        tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for tensor in (one, other)
    )
    return torch.equal(first, second)


@dataclass(frozen=True, slots=True)
class _TunedPart:
    path: str
    share: float
    result: OptimizeResult


def _tuned_parts(job: PartsJob, model: nn.Module, seen: _Recorded) -> Iterator[_TunedPart]:
    """The parts below a model, from the top down."""
    done: set[int] = set()

    def visit(path: str, module: nn.Module) -> Iterator[_TunedPart]:
        if id(module) in done or not any(parameter.dim() > 1 for parameter in module.parameters()):
            return  # norms and activations alone are not worth a program each
        done.add(id(module))
        if path and seen.may_be_part(path) and not job.deadline.is_over:
            job.observer(f"tuning {path} by itself", 0, 0)
            with suppress(CaptureError):
                yield _TunedPart(path, seen.share(path), _tuned_part(job, path, module, seen))
                return
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)

    return visit("", model)


def _tuned_part(job: PartsJob, path: str, module: nn.Module, seen: _Recorded) -> OptimizeResult:
    """Tune one module, for every shape that it is called with.

    Raises:
        CaptureError: it cannot be captured, or it overwrites an argument, which its program would not do.
    """
    name = f"{job.name}.{path}"
    tuner = job.tuner_of(name, job.settings)
    results: list[OptimizeResult] = []
    examples = list(seen.calls[path].examples.values())
    for args, kwargs in examples:
        seconds = job.deadline.left_s * max(seen.share(path), 0.01) / len(examples)
        result = tune_whole(
            module,
            args,
            kwargs,
            name=name,
            settings=job.settings,
            watch=job.observer,
            tuner=tuner,
            deadline=Deadline(seconds),
        )
        captured = result.program.programs[0].captured
        if captured is not None and captured.overwritten:
            raise CaptureError(f"{path} overwrites its argument {captured.overwritten[0]}")
        results.append(result)
    first = next((result for result in results if not result.plan.baseline), results[0])
    for result, (args, kwargs) in zip(results, examples, strict=True):
        if result is not first:
            first.program.add(args, kwargs, result.program.programs[0])
    return first


def _timed(
    job: PartsJob, copies: tuple[IsolatedCopy, IsolatedCopy], *, overwrites: bool
) -> dict[str, end_to_end.Latency]:
    """Times of the stock module and of the copy with parts replaced, in turn."""
    limits = end_to_end.TimingLimits.of(job.settings.effort, job.deadline)
    stock, trial = copies
    with torch.no_grad():
        return end_to_end.interleave(
            {"torch.eager": _call(stock, copy=overwrites), "convoy": _call(trial, copy=overwrites)},
            cuda=any(parameter.is_cuda for parameter in job.model.parameters()),
            rounds=limits.rounds,
            most_s=limits.most_s,
        )


def _leftovers(isolated: IsolatedCopy, parts: list[str]) -> CallLeftovers:
    """The attributes that calls change. Inside a part, a program holds the first call's values as constants.

    Outside of parts PyTorch runs, so any value is right there.
    """
    first, changed = left_by_calls(isolated)
    outside = (name for name in changed if not any(name.startswith(f"{path}.") for path in parts))
    return CallLeftovers(first.filled, frozenset(outside))


def _call(isolated: IsolatedCopy, *, copy: bool) -> Callable[[], object]:
    """A function that calls the model once, on new copies of its arguments if it overwrites them."""

    def run() -> object:
        args, kwargs = isolated.arguments() if copy else (isolated.args, isolated.kwargs)
        return isolated.model(*args, **kwargs)

    return run


def _told(job: PartsJob, parts: list[OptimizedPart]) -> str:
    """Which parts programs compute, and why not the whole."""
    names = [part.path for part in sorted(parts, key=_share, reverse=True)]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    share = min(1.0, sum(map(_share, parts)))
    reason = job.reason if len(job.reason) <= LONGEST_REASON else f"{job.reason[:LONGEST_REASON]}..."
    return (
        f"{job.name} was optimized by parts: Convoy runs {', '.join(names[:MOST_NAMES])}{more}"
        f" ({share:.0%} of PyTorch's time) and PyTorch runs the rest, because {reason}"
    )


def _share(part: OptimizedPart) -> float:
    return part.share


def _joint_plan(job: PartsJob, plans: list[Plan], notes: tuple[str, ...]) -> Plan:
    """A plan that shows the parts' totals and notes. It has no steps: they cannot be replayed on the whole model."""
    return dataclasses.replace(
        plans[0],
        model=job.name,
        graph_digest=NO_GRAPH,
        steps=(),
        baseline=True,
        solver="modules",
        total_us=sum(plan.total_us for plan in plans),
        bound_us=sum(plan.bound_us for plan in plans),
        predicted=any(plan.predicted for plan in plans),
        notes=(*notes, *dict.fromkeys(line for plan in plans for line in plan.notes)),
    )
