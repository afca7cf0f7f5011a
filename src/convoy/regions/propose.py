"""All proposals for a graph, pattern by pattern."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from convoy.graph.ir import CONVOLUTIONS, GRADIENTS, LAYERS, Graph
from convoy.problem import WeightMask
from convoy.regions.banded import banded_regions
from convoy.regions.block import block_regions
from convoy.regions.casts import cast_regions
from convoy.regions.conv import conv_region
from convoy.regions.epilogue import chains
from convoy.regions.expanded import expanded_regions
from convoy.regions.glue import glue_regions
from convoy.regions.gradient import gradient_regions, has_constant_image
from convoy.regions.inverted import inverted_regions
from convoy.regions.linear import linear_region
from convoy.regions.mask import with_mask
from convoy.regions.merge import merge_regions
from convoy.regions.norm import norm_regions
from convoy.regions.op import op_region
from convoy.regions.pool import pool_regions
from convoy.regions.region import Region
from convoy.regions.whole import WholeScope, whole_regions

PATTERNS: Final = ("merge", "banded", "block", "inverted", "expanded", "norm", "pool", "whole")
"""Patterns that are proposed only for engines that ask for them (`Engine.patterns`): parallel convolutions as one, a depthwise
convolution with its neighbours, the three convolutions of a bottleneck and of an inverted residual block, the first two of the
latter, each batch norm of a training step with its neighbours, poolings apart from it, and the whole net and parts of it."""

EVERY_PART: Final = WholeScope(parts=64, stages=True)
"""All parts of nets that a plan may name."""


def propose(
    graph: Graph,
    *,
    layouts: tuple[str, ...],
    numerics: str,
    masks: Mapping[str, WeightMask] | None = None,
    patterns: Collection[str] = (),
    band_bytes: int = 0,
    buckets: Sequence[Collection[str]] = (),
    apart: Sequence[tuple[str, ...]] = (),
    whole: WholeScope = EVERY_PART,
) -> list[Region]:
    """Regions with which selection may cover a graph: in graph order of their first node, glue, casts and nets last.

    Every node has a region of its own (`conv`, `linear`, `dgrad`, `wgrad`, `op`, `draw`): there is a cover. All are convex.

    Args:
        graph: a graph that `verify` accepts.
        layouts: memory formats to offer for 4-D values, the caller's first.
        numerics: the rounding that the user allows; part of every layer's problem.
        masks: positions of pruned weights' values by constant: their convolutions are also offered with the mask.
        patterns: those of `PATTERNS` that some engine has kernels for.
        band_bytes: least size of a value inside a `banded` region.
        buckets: names of results that are sent to other processes together.
        apart: convex groups of nodes: no glue mixes them with others.
        whole: which parts of the net the pattern `whole` proposes.
    """
    found: list[Region] = []
    epilogues: set[str] = set()
    for node in graph.nodes:
        if node.op in GRADIENTS and not has_constant_image(graph, node):
            regions = list(gradient_regions(graph, node, layouts, numerics))
            epilogues.update(set(regions[-1].nodes) - {node.name})
            found += regions
            continue
        if own := chains(graph, node) if node.op in LAYERS else []:
            epilogues.update(own[-1].names[1:])
        else:
            found.append(op_region(graph, node, layouts))
        for chain in own:
            conv = node.op in CONVOLUTIONS
            found.append(
                conv_region(graph, chain, layouts, numerics) if conv else linear_region(graph, chain, numerics)
            )
        if node.op == "conv2d":
            found += pool_regions(graph, own, layouts, numerics)
    found = [with_mask(region, masks or {}) for region in found]
    found += _several_layers(graph, layouts, patterns, band_bytes)
    norms = norm_regions(graph, layouts) if "norm" in patterns else []
    with_norms = {name for region in norms for name in region.nodes}
    glue = glue_regions(graph, epilogues, layouts, with_norms, pools="pool" in patterns, apart=apart)
    grouped = {region.nodes for region in glue}
    alone = [region for region in norms if region.nodes not in grouped]
    nets = whole_regions(graph, layouts, whole) if "whole" in patterns else []
    return [*found, *glue, *alone, *cast_regions(graph, layouts, buckets), *nets]


def _several_layers(
    graph: Graph, layouts: tuple[str, ...], patterns: Collection[str], band_bytes: int
) -> Iterator[Region]:
    """Regions of several convolutions, of the patterns that are asked for."""
    if "merge" in patterns:
        yield from merge_regions(graph, layouts)
    if "banded" in patterns:
        yield from banded_regions(graph, layouts, band_bytes)
    if "block" in patterns:
        yield from block_regions(graph, layouts)
    if "inverted" in patterns:
        yield from inverted_regions(graph, layouts)
    if "expanded" in patterns:
        yield from expanded_regions(graph, layouts)
