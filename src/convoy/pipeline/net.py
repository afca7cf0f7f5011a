"""The stages between a module and a choice, as plain functions that hand data on: capture, regions, measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils import _pytree as pytree

from convoy.capture import Captured, capture_with_original
from convoy.capture.weight_masks import weight_masks
from convoy.engines.activation_sparsity import SparsityShares
from convoy.engines.base import Engine
from convoy.engines.competition import competing_engines, load_competitor
from convoy.errors import CaptureError, InputError, PlanError
from convoy.measurement import ChildRunner, InProcessRunner, Runner, detect_target, zero_shares
from convoy.measurement.device.memory_limit import refresh_memory_limit
from convoy.measurement.failure import is_out_of_memory
from convoy.perfdb import Database
from convoy.pipeline.search_pruning import (
    nchw_to_skip,
    prefer_measured,
    share_of_problems,
    skips_layout_search,
    subsumed_problems,
)
from convoy.pipeline.selection_input import distinct_problems, layout_problems, zeros_by_problem
from convoy.plan import Plan
from convoy.problem import LayoutProblem
from convoy.regions import PATTERNS, Region, fused_regions, propose
from convoy.settings import LayoutChoice, Settings
from convoy.target import Target
from convoy.tune import SearchResult, search
from convoy.user_warning import warn_user

Observer = Callable[[str, int, int], None]
"""Told what happens: message, how much is done, how much there is (0: unknown)."""


def ignore_progress(message: str, done: int, total: int) -> None:
    """An observer that tells nobody."""
    del message, done, total


@dataclass(slots=True)
class Net:
    """A captured net with everything that is derived from its shapes alone.

    Attributes:
        name: what the user called it.
        captured: graph and constants.
        regions: proposals.
        layouts: memory formats allowed, first the one that the caller's images have.
        border: memory format of 4-D inputs and outputs.
        copies: problems of layout changes, by (value, from, to).
        target: the device.
        batch_input: the input whose first side is the batch; empty where there is no input.
        inputs: the tensors that it was captured with; empty where they are not kept.
        zeros: what each value that a convolution reads could spare, by its name, on these inputs; empty where that was not
            counted, because no engine asks.
        original: the graph as it was captured, before any pass: the oracle's; None where it is not kept.
    """

    name: str
    captured: Captured
    regions: list[Region]
    layouts: tuple[str, ...]
    border: dict[str, str]
    copies: dict[tuple[str, str, str], LayoutProblem]
    target: Target
    batch_input: str = ""
    inputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    zeros: dict[str, SparsityShares] = field(default_factory=dict[str, SparsityShares])
    original: Captured | None = None

    @property
    def regions_by_nodes(self) -> dict[tuple[str, tuple[str, ...]], Region]:
        """Regions by pattern and nodes: how a plan's step names one."""
        return {(region.pattern, region.nodes): region for region in self.regions}


def device_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """`cpu` or `cuda`: where the arguments and the parameters lie; InputError where they do not lie together."""
    tensors = [t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]
    if not tensors:
        raise InputError("args", args, "at least one tensor", "Pass example inputs as a tuple: (x,).")
    held = (*model.parameters(), *model.buffers())
    for argument, those in (("args", tensors), ("model", held)):
        if any(isinstance(t, FakeTensor) for t in those):
            raise InputError(argument, "FakeTensor", "tensors with data", "Leave FakeTensorMode before this call.")
    if any(isinstance(t, UninitializedTensorMixin) for t in held):
        raise InputError("model", type(model).__name__, "parameters with values", "Run it once: it has lazy layers.")
    found = sorted({t.device.type for t in (*tensors, *held)})
    if len(found) != 1:
        raise InputError("args", " and ".join(found), "model and inputs on one device", "Move both with .to(device).")
    if found[0] not in ("cpu", "cuda"):
        raise InputError("device", found[0], "cpu or cuda")
    return found[0]


def capture_net(
    name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, target: Target
) -> Net:
    """Module to graph and regions.

    Raises:
        CaptureError: the module cannot be exported, or overwrites its arguments, which its graph would not do.
    """
    captured, original = capture_with_original(model, args, kwargs)
    if captured.overwritten:
        raise CaptureError(f"the model overwrites its argument {captured.overwritten[0]}, which a graph does not do")
    graph = captured.graph
    given = captured.flatten_inputs(args, kwargs)
    border = input_formats(captured, given)
    first = next(iter(border.values()), "nchw")
    border.update((name_, first) for name_ in graph.outputs if len(graph.values[name_].spec.shape) == 4)
    net = make_net(name, captured, border, first, settings, target)
    net.inputs = given
    net.original = original
    return net


def input_formats(captured: Captured, given: Sequence[torch.Tensor]) -> dict[str, str]:
    """Memory format of each 4-D input, by value name."""
    named = zip(captured.graph.inputs, given, strict=True)
    return {value: memory_format(tensor) for value, tensor in named if tensor.dim() == 4}


def make_net(
    name: str,
    captured: Captured,
    border: dict[str, str],
    first: str,
    settings: Settings,
    target: Target,
    buckets: Sequence[Collection[str]] = (),
) -> Net:
    """A captured graph with its regions and layout changes.

    Args:
        name: what the user calls it.
        captured: the graph.
        border: memory format of 4-D inputs and outputs.
        first: the memory format that PyTorch would use inside.
        settings: what may be done.
        target: the device.
        buckets: names of results that travel to other processes together.
    """
    graph = captured.graph
    border = {
        value: first if fits_both_layouts(graph.values[value].spec.shape) else known for value, known in border.items()
    }
    layouts = allowed_layouts(settings.layout, first)
    given = dict.fromkeys(border.values())  # what comes or is wanted in a format needs no leave to have it
    quick = skips_layout_search(settings, target)
    layouts = tuple(given) if quick and set(given) == {"nhwc"} else tuple(dict.fromkeys((*layouts, *given)))
    engines = engines_on(target, settings)
    regions = propose(
        graph,
        layouts=layouts,
        numerics=str(settings.numerics),
        masks=weight_masks(captured),
        patterns={pattern for engine in engines for pattern in engine.patterns},
        band_bytes=_least_inside(target),
        buckets=buckets,
    )
    known = {region.id for region in regions}
    for engine in engines:
        own = fused_regions(graph, engine.fusions(graph), layouts, engine.id)
        regions += [region for region in own if region.id not in known]
        known.update(region.id for region in own)
    copies = layout_problems(graph, layouts)
    return Net(name, captured, regions, layouts, border, copies, target, next(iter(graph.inputs), ""))


def engines_on(target: Target, settings: Settings) -> list[Engine]:
    """The engines that compete and have code for the target's device."""
    found = [load_competitor(engine, settings.engines) for engine in competing_engines(settings)]
    for engine in found:
        for pattern in engine.patterns:
            if pattern not in PATTERNS:
                raise InputError(f"patterns of engine {engine.id}", pattern, "one of " + ", ".join(PATTERNS))
    return [engine for engine in found if target.device in engine.devices]


LEAST_INSIDE: Final = 1 << 20
"""Bytes that any processor's second cache has, or nearly."""


def _least_inside(target: Target) -> int:
    """Bytes from which a value inside had better never be there as a whole: a quarter of the last cache, which others want too.

    What is smaller was no faster in bands where it was tried (docs/kernels/cpu.md).
    """
    return max(LEAST_INSIDE, target.cache_bytes // 4)


def memory_format(tensor: torch.Tensor) -> str:
    """`nhwc` where a 4-D tensor is channels_last and not contiguous as well, else `nchw`."""
    channels_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return "nhwc" if channels_last and not tensor.is_contiguous() else "nchw"


def fits_both_layouts(shape: Sequence[int]) -> bool:
    """Whether contiguous tensors of a 4-D shape lie alike in both memory formats, as the weight of a 1x1 convolution does."""
    return shape[1] == 1 or shape[2:] == (1, 1)


def allowed_layouts(choice: LayoutChoice, first: str) -> tuple[str, ...]:
    """Memory formats that selection may use: the caller's first, for that is what PyTorch would use."""
    if choice is LayoutChoice.AUTO:
        return (first, "nhwc" if first == "nchw" else "nchw")
    return tuple(dict.fromkeys((first, str(choice))))


def make_runner(target: Target, settings: Settings) -> Runner:
    """The runner that the settings ask for; it starts nothing until something is to be measured."""
    kind = ChildRunner if settings.isolate else InProcessRunner
    return kind(
        target,
        extra_engines=settings.engines,
        timeout_s=settings.timeout_s,
        memory_bytes=settings.tuning_memory_bytes,
    )


def measure(
    net: Net, settings: Settings, database: Database, observer: Observer, share: tuple[int, int] = (0, 1)
) -> SearchResult:
    """Everything that the net's regions and layout changes need, from the database or from the clock.

    Args:
        net: the net.
        settings: what may compete, and how much to measure.
        database: where rows come from and go to.
        observer: told of the progress.
        share: which of how many shares of it, the same in every process that takes one.
    """
    engines = competing_engines(settings)
    zeros_uncounted = False
    loaded = [load_competitor(engine, settings.engines) for engine in engines]
    if net.inputs and not net.zeros and any(engine.skips_zeros for engine in loaded):
        observer("counting zeros", 0, 0)
        zeros_uncounted = not _count_zeros(net)
    runner = make_runner(net.target, settings)
    try:
        found = search(
            share_of_problems(distinct_problems(net.regions, net.copies), *share),
            engine_ids=engines,
            target=net.target,
            settings=settings,
            database=database,
            runner=runner,
            baseline_only=subsumed_problems(net.regions) | nchw_to_skip(net.regions, loaded, settings, net.target),
            zeros=zeros_by_problem(net.regions, net.zeros),
            on_progress=lambda done, total, message: observer(message, done, total),
        )
    finally:
        runner.close()
    refresh_memory_limit()
    found = replace(found, zeros_uncounted=zeros_uncounted)
    return prefer_measured(net.regions, found) if found.predicted else found


def _count_zeros(net: Net) -> bool:
    """Whether there was room for a run of the net that counts zeros. Without, nothing is known that could be skipped.

    What the run took is given back either way: the process that measures may have no other room.
    """
    try:
        net.zeros = zero_shares(net.captured.graph, net.captured.constants, net.inputs)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        counted = False
    else:
        counted = True
    torch.cuda.empty_cache()
    return counted


CUT: Final = "measuring ended"
"""How the note begins that tells of a search that ran out of time."""


def prediction_notes(found: SearchResult) -> list[str]:
    """What to tell of a plan that rests on predictions."""
    wrong = (
        f"{found.wrong_predictions} predicted choices made the whole wrong, failed by themselves too and were replaced"
    )
    zeros_uncounted = "there was no memory to count zeros: what skips them is taken for what it does without any"
    notes = [
        note for note, holds in ((wrong, found.wrong_predictions), (zeros_uncounted, found.zeros_uncounted)) if holds
    ]
    if not found.predicted:
        return [f"{CUT} {found.cut}", *notes] if found.cut else notes
    whole = f"{found.predicted} of {len(found.rows)} problems were never measured on this target"
    crowded = f"there was no memory to measure PyTorch's own on {found.baseline_out_of_memory} of them"
    why = (
        f"{CUT} {found.cut}"
        if found.cut
        else crowded
        if found.baseline_out_of_memory
        else "effort none measures nothing"
    )
    how = "their times are predicted from other problems on devices of the same name"
    return [f"{whole}, and {why}: {how}", *notes]


def check_target(plan: Plan, target: Target) -> None:
    """Refuse a plan that was made for another machine or software; raises PlanError."""
    if plan.target.get("digest") != target.digest:
        made = f"{plan.target.get('name')} ({plan.target.get('digest')})"
        here = f"this machine and software, {target.name} ({target.digest})"
        raise PlanError("plan.target", made, here, "Tune here: `convoy optimize`.")


def warn_of_changes(plan: Plan, bound: Plan) -> None:
    """Warn the user where a saved plan runs otherwise than it was made: on the baseline in part, or without a CUDA graph."""
    fresh = [note for note in bound.notes if note not in plan.notes]
    if fresh:
        more = f", and {len(fresh) - 1} more (see the plan's notes)" if len(fresh) > 1 else ""
        warn_user(f"the plan runs otherwise than it was made: {fresh[0]}{more}; tune the model anew")


def target_for(device: str) -> Target:
    """The target of a device word."""
    return detect_target(device)


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._start
