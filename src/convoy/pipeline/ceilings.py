"""A device's roofline ceilings, known or measured before the net needs memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from convoy.deadline import Deadline
from convoy.graph.ir import Graph
from convoy.graph.layers import conv3d_problem, conv_problem
from convoy.measurement import Peaks, floor_us, peaks
from convoy.measurement.device.known_peaks import DevicePeaks, find_peaks, keep_peaks
from convoy.measurement.device.memory_limit import refresh_memory_limit
from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline.net import Net
from convoy.problem import LayerProblem, Problem
from convoy.program.cuda.recording import forget_library_workspaces
from convoy.settings import Effort, Settings
from convoy.target import Target
from convoy.tuning_profile import phase

NO_CEILINGS: Final = (
    "FLOP/s and memory bandwidth could not be measured for lack of device memory: the report has no direct floors"
)
"""Note of a plan that was made without them."""

PATIENT_FROM_S: Final = 60.0
"""Time limit of a call, seconds, from which the ceilings may take their second, or on a busy machine some seconds."""

NO_DEADLINE: Final = Deadline()


def ceilings_of(target: Target, settings: Settings, deadline: Deadline = NO_DEADLINE) -> Peaks | None:
    """The ceilings: those that are known of the device, or measured and kept beside the database if they settled.

    Effort `none`, and a call with little time, take those that are shipped, or measured by other software versions, too.

    Returns:
        None if they are not known, and measuring them does not fit in memory.
    """
    brief = is_brief(settings.effort, deadline)
    with phase("roofline ceilings"):
        found = find_peaks(target, settings.db, brief=brief)
        if found is None:
            found = measure_ceilings(target, settings.effort, deadline)
            if found is not None and found.settled:
                keep_peaks(DevicePeaks(target, found, brief), settings.db)
    return found


def is_brief(effort: Effort, deadline: Deadline) -> bool:
    """Whether a call is to answer soon: at effort `none`, and where less than `PATIENT_FROM_S` is left."""
    return effort is Effort.NONE or deadline.left_s < PATIENT_FROM_S


def measure_ceilings(target: Target, effort: Effort = Effort.QUICK, deadline: Deadline = NO_DEADLINE) -> Peaks | None:
    """The ceilings; None if measuring them does not fit in memory. The memory is freed in any case.

    Effort `none`, and a call with little time, take the best of few runs.

    A tuned net may leave too little: of 606 MiB, ResNet-50 at batch 32 left 50 (H100, commit c829457).
    """
    refresh_memory_limit()
    try:
        found = peaks(target, brief=is_brief(effort, deadline))
    except Exception as error:  # everything: out of memory has several types; any other error is raised again
        if not is_out_of_memory(error):
            raise
        found = None
    if target.device == "cuda":
        forget_library_workspaces()
        torch.cuda.empty_cache()
    return found


BUSY: Final = (
    "the highest FLOP/s and memory bandwidth measured on this device vary, as they do where other programs run or clocks change: "
    "direct floors and short times are uncertain; tune again when nothing else runs"
)
"""Note of a plan that was made with ceilings that did not settle. An idle GPU may have it too, by its power limit."""


def ceiling_notes(found: Peaks | None) -> list[str]:
    """Notes of a plan whose report has no ceilings, or uncertain ones."""
    if found is None:
        return [NO_CEILINGS]
    return [] if found.settled else [BUSY]


MULTI_CONV_PATTERNS: Final = ("banded", "block", "expanded", "inverted", "merge", "whole")
"""Patterns of regions that are several convolutions."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Operations of a step, and the dtype that they are stored in; none for a subgraph without convolutions."""

    dtype: str = "fp32"
    flops: int = 0


def work_of(graph: Graph, pattern: str, nodes: Sequence[str], problem: Problem) -> LayerWork:
    """The operations of a region: of its own problem if that is a layer, else of the convolutions inside."""
    if isinstance(problem, LayerProblem):
        return LayerWork(problem.y_spec.dtype, problem.flops)
    inside = [graph.node(name) for name in (nodes if pattern in MULTI_CONV_PATTERNS else ())]
    layers: list[LayerProblem] = [conv_problem(graph, node) for node in inside if node.op == "conv2d"]
    layers += [conv3d_problem(graph, node) for node in inside if node.op == "conv3d"]
    return LayerWork(layers[0].y_spec.dtype, sum(layer.flops for layer in layers)) if layers else LayerWork()


def problem_floor(net: Net, found: Peaks | None) -> Callable[[Problem], float] | None:
    """The floor of each problem of a net at the ceilings, microseconds; None without ceilings."""
    if found is None:
        return None
    graph = net.captured.graph
    several = {
        problem.key: work_of(graph, region.pattern, region.nodes, problem)
        for region in net.regions
        if region.pattern in MULTI_CONV_PATTERNS
        for problem in region.problems
    }

    def floor(problem: Problem) -> float:
        work = several.get(problem.key, LayerWork())
        return floor_us(problem, found, work.dtype, work.flops)

    return floor
