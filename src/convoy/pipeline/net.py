"""Net: a captured model with its regions and layout changes; the input of measuring and selection."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from convoy.capture import Captured, capture_with_original
from convoy.capture.weight_masks import weight_masks
from convoy.engines.activation_sparsity import SparsityShares
from convoy.engines.base import Engine
from convoy.engines.competition import competing_engines, load_competitor
from convoy.engines.known_defects import defect_of
from convoy.engines.subgraph import torch_format
from convoy.errors import CaptureError, InputError
from convoy.measurement import Peaks
from convoy.pipeline.search_pruning import (
    skips_layout_search,
)
from convoy.pipeline.selection_input import layout_problems
from convoy.problem import ConvolutionProblem, LayoutProblem, image_layout, layout_beside
from convoy.regions import PATTERNS, Region, fused_regions, propose
from convoy.regions.propose import EVERY_PART
from convoy.regions.whole import PATTERN as WHOLE
from convoy.regions.whole import WholeScope
from convoy.settings import Effort, LayoutChoice, Numerics, Settings
from convoy.target import Target
from convoy.tuning_profile import phase


@dataclass(frozen=True, slots=True)
class Net:
    """A captured net with everything that is derived from its shapes.

    Attributes:
        name: the user's name for it.
        captured: graph and constants.
        regions: proposed regions.
        layouts: memory formats that selection may use, first that of the caller's images; volumes have the alike ones.
        border: memory format of 4-D inputs and outputs.
        copies: problems of layout changes, by (value, from, to).
        target: the device.
        batch_input: the input whose first dimension is the batch; empty if there is no input.
        inputs: the tensors that the net was captured with; empty if they are not kept.
        zeros: by name, the shares of zeros of each value that a convolution reads, on these inputs; empty if they were not
            counted.
        zeros_uncounted: whether there was no memory to count them.
        original: the captured graph before any pass, for the oracle; None if it is not kept.
        ceilings: the device's peak rates, for floors; None if they are not known (yet).
    """

    name: str
    captured: Captured
    regions: Sequence[Region]
    layouts: tuple[str, ...]
    border: Mapping[str, str]
    copies: Mapping[tuple[str, str, str], LayoutProblem]
    target: Target
    batch_input: str = ""
    inputs: Sequence[torch.Tensor] = ()
    zeros: Mapping[str, SparsityShares] = field(default_factory=dict[str, SparsityShares])
    zeros_uncounted: bool = False
    original: Captured | None = None
    ceilings: Peaks | None = None

    @property
    def regions_by_nodes(self) -> dict[tuple[str, tuple[str, ...]], Region]:
        """Regions by pattern and nodes, as a plan's step names them."""
        return {(region.pattern, region.nodes): region for region in self.regions}


def capture_net(
    name: str,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    target: Target,
    *,
    run: bool = False,
) -> Net:
    """Capture a module and propose regions. `run`: as for `capture_with_original`.

    Raises:
        CaptureError: the module cannot be exported, or it overwrites its arguments, which a graph does not do.
    """
    captured, original = capture_with_original(model, args, kwargs, run=run)
    if captured.overwritten:
        raise CaptureError(f"the model overwrites its argument {captured.overwritten[0]}, which a graph does not do")
    graph = captured.graph
    given = captured.flatten_inputs(args, kwargs)
    border = input_formats(captured, given)
    first = image_layout(next(iter(border.values()), "nchw"))
    ranks = {value: len(graph.values[value].spec.shape) for value in graph.outputs if graph.has_layout(value)}
    border.update((value, layout_beside(first, rank)) for value, rank in ranks.items())
    with phase("regions"):
        net = make_net(name, captured, border, first, settings, target)
    return replace(net, inputs=tuple(given), original=original)


def input_formats(captured: Captured, given: Sequence[torch.Tensor]) -> dict[str, str]:
    """Memory format of each input that has one (`Graph.has_layout`), by value name."""
    named = zip(captured.graph.inputs, given, strict=True)
    return {value: memory_format(tensor) for value, tensor in named if captured.graph.has_layout(value)}


def make_net(
    name: str,
    captured: Captured,
    border: Mapping[str, str],
    first: str,
    settings: Settings,
    target: Target,
    buckets: Sequence[Collection[str]] = (),
    apart: Sequence[tuple[str, ...]] = (),
    *,
    joined_too: bool = False,
) -> Net:
    """A captured graph with its regions and layout changes.

    Args:
        name: the user's name for it.
        captured: the graph.
        border: memory format of 4-D inputs and outputs.
        first: the memory format that PyTorch would use between layers.
        settings: layouts, numerics and engines that are allowed.
        target: the device.
        buckets: names of results that are sent to other processes together.
        apart: convex groups of nodes; no region holds nodes of one and others.
        joined_too: whether regions with nodes of both are there all the same, for a plan that may have been made without `apart`.
    """
    graph = captured.graph
    shapes = {value: graph.values[value].spec.shape for value in border}
    border = {
        value: layout_beside(first, len(shapes[value])) if fits_both_layouts(shapes[value]) else known
        for value, known in border.items()
    }
    layouts = allowed_layouts(settings.layout, first)
    given = dict.fromkeys(
        map(image_layout, border.values())
    )  # what the caller has is allowed, whatever the settings say
    quick = skips_layout_search(settings, target)
    layouts = tuple(given) if quick and set(given) == {"nhwc"} else tuple(dict.fromkeys((*layouts, *given)))
    ask = partial(propose, graph, layouts=layouts, numerics=str(settings.numerics), buckets=buckets)
    ask = partial(ask, masks=weight_masks(captured), band_bytes=LEAST_INSIDE)
    engines = engines_on(target, settings)
    patterns = {pattern for engine in engines for pattern in engine.patterns} | _whole(settings, target)
    ask = partial(ask, patterns=patterns, whole=whole_scope(settings, target))
    found = [*ask(apart=apart), *(ask() if apart and joined_too else ())]
    regions = _with_kernels({region.id: region for region in found}.values(), engines, target)
    known = {region.id for region in regions}
    for engine in engines:
        own = fused_regions(graph, engine.fusions(graph), layouts, engine.id)
        regions += [region for region in own if region.id not in known]
        known.update(region.id for region in own)
    if not joined_too:
        regions = [region for region in regions if not any(_mixes(region.nodes, group) for group in apart)]
    copies = layout_problems(graph, layouts)
    return Net(name, captured, regions, layouts, border, copies, target, next(iter(graph.inputs), ""))


def _mixes(nodes: Sequence[str], group: Collection[str]) -> bool:
    """Whether some of the nodes are in the group, and some are not."""
    return 0 < sum(name in group for name in nodes) < len(nodes)


def _with_kernels(found: Iterable[Region], engines: Sequence[Engine], target: Target) -> list[Region]:
    """The regions without blocks that no engine computes, and without whole nets that PyTorch may compute wrongly."""
    blocks = ("block", "expanded", "inverted")
    regions = [region for region in found if region.pattern not in blocks or _has_kernel(region, engines, target)]
    if _has_defects(regions, target):  # a layer by itself avoids them
        return [region for region in regions if region.pattern != WHOLE]
    return regions


def _has_kernel(region: Region, engines: Sequence[Engine], target: Target) -> bool:
    """Whether an engine that asked for a region's pattern computes it; else only the baseline would be measured."""
    asking = [engine for engine in engines if region.pattern in engine.patterns]
    return any(engine.accepts(problem, target) for engine in asking for problem in region.problems)


def _whole(settings: Settings, target: Target) -> set[str]:
    """The pattern of whole nets, but where PyTorch's own products may round more than is allowed."""
    return set() if settings.numerics is Numerics.STRICT and target.device != "cpu" else {WHOLE}


def _has_defects(regions: Sequence[Region], target: Target) -> bool:
    """Whether PyTorch computes a convolution wrongly, in a memory format, by a known defect."""
    problems = (problem for region in regions if region.pattern == "conv" for problem in region.problems)
    return any(isinstance(problem, ConvolutionProblem) and defect_of(problem, target) for problem in problems)


def whole_scope(settings: Settings, target: Target) -> WholeScope:
    """How many parts of a net compete as a whole: compiling one takes seconds, on a CPU those of its few cores."""
    if settings.effort is Effort.FULL:
        return EVERY_PART
    return WholeScope(parts={"cuda": 8}.get(target.device, 2) if settings.effort is Effort.QUICK else 0)


def engines_on(target: Target, settings: Settings) -> list[Engine]:
    """The engines that compete and have code for the target's device."""
    found = [load_competitor(engine, settings.engines) for engine in competing_engines(settings)]
    for engine in found:
        for pattern in engine.patterns:
            if pattern not in PATTERNS:
                raise InputError(f"patterns of engine {engine.id}", pattern, "one of " + ", ".join(PATTERNS))
    return [engine for engine in found if target.device in engine.devices]


LEAST_INSIDE: Final = 256 << 10
"""Bytes from which inner values are computed in bands: half of a second-level cache, for a core holds as much anyway. The
last-level cache is often shared with other programs: MobileNetV2 at batch 1 took 5.6 ms in bands and 6.3 without in one minute,
4.7 both ways in another (two cores of an EPYC 7003 with 32 MB, in no file of bench/results)."""


def memory_format(tensor: torch.Tensor) -> str:
    """`nhwc` if a 4-D tensor is channels_last and not also contiguous, else `nchw`; `ndhwc` and `ncdhw` if it is 5-D."""
    rank = tensor.dim()
    channels_last = tensor.is_contiguous(memory_format=torch_format("ndhwc", rank)) and not tensor.is_contiguous()
    return layout_beside("nhwc" if channels_last else "nchw", rank)


def fits_both_layouts(shape: Sequence[int]) -> bool:
    """Whether a contiguous 4-D or 5-D tensor has the same memory order in both formats, like the weight of a 1x1 convolution."""
    return shape[1] == 1 or set(shape[2:]) == {1}


def allowed_layouts(choice: LayoutChoice, first: str) -> tuple[str, ...]:
    """Memory formats that selection may use, first the caller's, which PyTorch would use."""
    if choice is LayoutChoice.AUTO:
        return (first, "nhwc" if first == "nchw" else "nchw")
    return tuple(dict.fromkeys((first, str(choice))))
