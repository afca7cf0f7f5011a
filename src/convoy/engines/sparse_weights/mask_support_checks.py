"""Support checks that all engines for pruned weights share; each refusal has a reason."""

from __future__ import annotations

from typing import Final

from convoy.engines.support_checks import plain_convolution
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

LEAST_CAPABILITY: Final = 80
"""cp.async."""

_INDEX_LIMIT = 2**31


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


def cuda_convolution(problem: Problem, target: Target) -> Support:
    """A masked convolution for CUDA C that copies asynchronously: fp32 or fp16, nchw, on capability 8.0 and newer."""
    if target.capability < LEAST_CAPABILITY:
        return Support.no(f"needs a CUDA device of capability 8.0 or newer, got {target.name}")
    if not (support := masked_convolution(problem)):
        return support
    assert isinstance(problem, ConvProblem)
    if problem.x_dtype not in ("fp32", "fp16"):
        return Support.no(f"needs fp32 or fp16, got {problem.x_dtype}")
    if problem.layout != "nchw":
        return Support.no(f"needs layout nchw, got {problem.layout}")
    return Support.yes()


def hopper_convolution(problem: Problem, target: Target) -> Support:
    """A masked convolution for Hopper's tensor cores: half types, nhwc, no groups, channels and filters in whole vectors."""
    if target.device != "cuda" or target.capability != 90:
        return Support.no(f"is made for GPUs of compute capability 9.0, got {target.name}")
    if not (support := masked_convolution(problem)):
        return support
    assert isinstance(problem, ConvProblem)
    if problem.x_dtype not in ("fp16", "bf16"):
        return Support.no(f"needs fp16 or bf16, got {problem.x_dtype}")
    if problem.acc_dtype != "fp32":
        return Support.no(f"accumulates in fp32, got acc_dtype {problem.acc_dtype}")
    if problem.layout != "nhwc":
        return Support.no(f"needs layout nhwc, got {problem.layout}")
    if problem.groups != 1:
        return Support.no(f"needs groups = 1, got {problem.groups}")
    if problem.c % 8 or problem.k % 8:
        return Support.no(f"needs c and k as multiples of 8, got {problem.c} and {problem.k}")
    largest = max(s.elements for s in (problem.x_spec, problem.weight_spec, problem.y_spec))
    if largest >= _INDEX_LIMIT:
        return Support.no(f"indexes tensors of fewer than 2^31 elements, got {largest}")
    return Support.yes()
