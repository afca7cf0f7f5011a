"""Pruning of the search: problems that need not be measured, and regions whose predictions are not used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from zlib import crc32

from convoy.engines.base import Engine
from convoy.engines.manifest import BASELINE
from convoy.problem import ConvProblem, Problem
from convoy.regions import Region
from convoy.settings import Effort, LayoutChoice, Settings
from convoy.target import Target
from convoy.tune import SearchResult

SKIPPING_SETTINGS: Final = frozenset({(LayoutChoice.AUTO, Effort.QUICK), (LayoutChoice.AUTO, Effort.NONE)})
"""Layout and efforts at which only a caller's channels_last is searched on a GPU. On an H100, nchw was faster for 48 of 610
layers (fp16, batch 1), only layers for which no kernel of Convoy had been measured; searching it takes half of the tuning
time."""


def skips_layout_search(settings: Settings, target: Target) -> bool:
    """Whether only the memory formats of the inputs and outputs are searched."""
    return target.device == "cuda" and (settings.layout, settings.effort) in SKIPPING_SETTINGS


def share_of_problems(problems: Sequence[Problem], index: int, count: int) -> list[Problem]:
    """One of several shares of the problems. Variants of a layer, which are neighbours, go to different shares."""
    dealt = sorted(problems, key=lambda problem: crc32(problem.key.encode())) if count > 1 else list(problems)
    chosen = {problem.key for problem in dealt[index::count]}
    return [problem for problem in problems if problem.key in chosen]


def subsumed_problems(regions: Sequence[Region]) -> set[str]:
    """Problems of regions that a region with a fused activation makes superfluous.

    A fused activation costs a kernel nothing, so the region without it is faster only by chance. A region without a residual is
    kept beside the one with it: if two convolutions are added, only one of them can fuse the sum.
    """
    chains: dict[tuple[str, str, int], int] = {}
    for region in regions:
        key = (region.pattern, region.nodes[0], len(region.args))
        chains[key] = max(chains.get(key, 0), len(region.nodes))
    shorter: set[str] = set()
    longest: set[str] = set()
    for region in regions:
        if region.pattern in ("conv", "conv_pool", "linear"):
            full = len(region.nodes) == chains[region.pattern, region.nodes[0], len(region.args)]
            (longest if full else shorter).update(problem.key for problem in region.problems)
    return shorter - longest


def nchw_to_skip(regions: Sequence[Region], engines: Sequence[Engine], settings: Settings, target: Target) -> set[str]:
    """Problems in nchw that are not worth measuring, because the same problem is measured in nhwc."""
    quick = skips_layout_search(settings, target) and target.capability >= 80
    return nchw_duplicates(regions, target) if quick and any(engine.takes_all_nhwc for engine in engines) else set()


def nchw_duplicates(regions: Sequence[Region], target: Target) -> set[str]:
    """Problems in nchw of forward convolutions that tensor cores compute, and that stand beside the same in nhwc.

    On an H100 none of 763 was faster in nchw where our kernels had been measured in nhwc (fp16 and fp32, batch 1 and 32); strict
    fp32, gradients and pruned weights were not part of that. Where a net has no other convolutions, its pieces in nchw belong
    to these: between convolutions in nhwc they would want two copies.
    """
    convs: set[str] = set()
    pieces: set[str] = set()
    others = False
    for region in regions:
        found = {problem for problem in region.problems if problem.layout == "nchw"}
        in_both = any(problem.layout == "nhwc" for problem in region.problems)
        for problem in found:
            if not isinstance(problem, ConvProblem):
                pieces.update([problem.key] if in_both else [])
            elif in_both and _on_tensor_cores(problem, target):
                convs.add(problem.key)
            else:
                others = True
    return convs | pieces if convs and not others else convs


def _on_tensor_cores(problem: ConvProblem, target: Target) -> bool:
    plain = problem.direction == "fprop" and not problem.weight_mask
    tf32 = (
        problem.numerics == "as_torch"
        and target.version("cudnn_tf32") != "off"
        and not target.version("fp32_precision")
    )
    return plain and problem.numerics != "strict" and (problem.x_dtype in ("fp16", "bf16") or tf32)


def prefer_measured(regions: Sequence[Region], found: SearchResult) -> SearchResult:
    """A search's result in which a region that was measured in one memory format has no predictions in the others.

    The best of many predictions is too optimistic: with 340 of 584 problems of a training step predicted, all of them measured
        in the other format, a plan for 13 ms took 46 (ResNet-50, batch 128, H200). A region of which only PyTorch's own time
        was measured
    does not count as measured: in nchw that is often the only measurement.
    """

    def is_measured(problem: Problem) -> bool:
        return any(row.ok and row.samples and row.config.engine != BASELINE for row in found.rows.get(problem.key, ()))

    known = {problem.key for region in regions for problem in region.problems if is_measured(problem)}
    kept = dict(found.rows)
    for region in regions:
        if any(problem.key in known for problem in region.problems):
            for key in {problem.key for problem in region.problems} - known:
                kept[key] = [row for row in kept.get(key, ()) if row.config.engine == BASELINE]
    return replace(found, rows=kept)
