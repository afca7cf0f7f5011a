"""What every engine for pruned weights asks of a problem, each "no" with its reason."""

from __future__ import annotations

from convoy.engines.conditions import plain_convolution
from convoy.problem import ConvProblem, Problem
from convoy.support import Support


def masked_convolution(problem: Problem, *, empty: bool = False) -> Support:
    """A forward convolution on ordinary tensors of one dtype whose mask is there, not its digest alone.

    Args:
        problem: anything.
        empty: whether batches of no images are taken.
    """
    support = plain_convolution(problem)
    if not support or not isinstance(problem, ConvProblem):
        return support
    if not problem.weight_mask:
        return Support.no("computes pruned weights only, got a problem without a mask")
    if problem.mask is None:
        return Support.no(f"needs the positions of mask {problem.weight_mask}, got its digest alone")
    if problem.n == 0 and not empty:
        return Support.no("needs a batch of at least 1, got 0")
    return Support.yes()
