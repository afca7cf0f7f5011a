"""The regions that a plan names, whichever engines competed when it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from convoy.engines.manifest import load_engine
from convoy.graph.ir import Graph
from convoy.plan.plan import Plan
from convoy.problem import WeightMask, image_layout
from convoy.regions import PATTERNS, Region, fused_regions, propose

_WITHOUT: Final = ((), ("pool",), ("norm",), ("pool", "norm"))
"""Patterns whose absence changes how the nodes beside them are grouped."""


def plan_regions(
    graph: Graph, plan: Plan, masks: Mapping[str, WeightMask]
) -> dict[tuple[str, tuple[str, ...]], Region]:
    """Regions by pattern and nodes, among them all that the plan names, if it is a plan of this graph.

    Args:
        graph: the graph.
        plan: a plan of it.
        masks: positions of pruned weights' values, by constant name.
    """
    wanted = {(step.pattern, step.nodes) for step in plan.steps if step.kind == "region"}
    layouts = tuple(dict.fromkeys((*map(image_layout, plan.border.values()), "nchw", "nhwc")))
    found: dict[tuple[str, tuple[str, ...]], Region] = {}
    for without in _WITHOUT:
        patterns = [name for name in PATTERNS if name not in without and (name in ("pool", "norm") or _has(plan, name))]
        for region in propose(graph, layouts=layouts, numerics=plan.numerics, patterns=patterns, masks=masks):
            found.setdefault((region.pattern, region.nodes), region)
        if wanted <= found.keys():
            return found
    for engine_id in dict.fromkeys(step.config.engine for step in plan.steps):  # patterns of an engine's own
        engine = load_engine(engine_id)
        for region in fused_regions(graph, engine.fusions(graph), layouts, engine.id):
            found.setdefault((region.pattern, region.nodes), region)
    return found


def _has(plan: Plan, pattern: str) -> bool:
    return any(step.pattern == pattern for step in plan.steps)
