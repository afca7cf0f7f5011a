"""A convolution with pruned weights: the same region, for engines whose code depends on the positions of the non-zeros.

before: %y = conv2d(%x, %w, %b, ...)           %w with many zeros
-->
after:  conv(y)         its problems as they were, in every memory format, and each with the mask of %w

Dense engines are measured on the problems without the mask, once for all masks; engines for pruned weights on the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from convoy.problem import ConvProblem, WeightMask
from convoy.regions.region import Region


def with_mask(region: Region, masks: Mapping[str, WeightMask]) -> Region:
    """The region with its problems on pruned weights after the dense ones; unchanged if its weight is not pruned."""
    mask = masks.get(region.constants[0]) if region.pattern == "conv" and region.constants else None
    if mask is None:
        return region
    masked = tuple(problem.with_mask(mask) for problem in region.problems if isinstance(problem, ConvProblem))
    return replace(region, problems=region.problems + masked)
