"""Support checks shared by the engines that use PyTorch's operations; each refusal has a reason."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.torch_operators import DTYPES
from convoy.problem import Conv3dProblem, ConvolutionProblem, ConvProblem, LinearProblem, Problem, kind_in_words
from convoy.support import Support


def plain_convolution(problem: Problem, directions: Sequence[str] = ("fprop",), *, pools: bool = False) -> Support:
    """Whether a problem is a convolution on ordinary tensors of one dtype, in one of these directions.

    Args:
        problem: anything.
        directions: the directions that the engine computes.
        pools: whether the engine does an epilogue's pooling.
    """
    if not isinstance(problem, ConvProblem):
        return Support.no(f"computes convolutions only, got {kind_in_words(problem)}")
    if problem.layout == "blocked":
        return Support.no("takes nchw and nhwc tensors, got blocked")
    dtypes = {problem.x_dtype, problem.weight_dtype, problem.y_dtype}
    if len(dtypes) != 1:
        return Support.no(f"needs x, weight and y of one dtype, got {', '.join(sorted(dtypes))}")
    if problem.acc_dtype == "fp64" and problem.x_dtype != "fp64":
        return Support.no("accumulates in fp32, got acc_dtype fp64")
    if not pools and not (unpooled := without_pooling(problem)):
        return unpooled
    if problem.direction not in directions:
        return Support.no(f"computes {' and '.join(directions)}, got {problem.direction}")
    return _gradients_epilogue(problem)


def volume_convolution(problem: Problem, directions: Sequence[str] = ("fprop",)) -> Support:
    """Whether a problem is a three-dimensional convolution in one of these directions, with an epilogue that it may have."""
    if not isinstance(problem, Conv3dProblem):
        return Support.no(f"computes three-dimensional convolutions, got {kind_in_words(problem)}")
    if problem.direction not in directions:
        return Support.no(f"computes {' and '.join(directions)}, got {problem.direction}")
    return _gradients_epilogue(problem)


def torch_convolution(problem: Problem, directions: Sequence[str] = ("fprop",)) -> Support:
    """`volume_convolution` of a three-dimensional convolution, `plain_convolution` without pooling of anything else."""
    volumes = isinstance(problem, Conv3dProblem)
    return volume_convolution(problem, directions) if volumes else plain_convolution(problem, directions)


def _gradients_epilogue(problem: ConvolutionProblem) -> Support:
    """Refuses an epilogue that a gradient cannot have."""
    if problem.direction == "dgrad" and problem.epilogue:
        return Support.no(f"a data gradient has no epilogue, got {problem.epilogue}")
    if problem.direction == "wgrad" and (problem.epilogue.residual or problem.epilogue.activation != "none"):
        return Support.no(f"a weight gradient has no epilogue but the bias's, got {problem.epilogue}")
    return Support.yes()


def without_pooling(problem: ConvProblem) -> Support:
    """Refuses a pooling epilogue: for every engine that leaves the pooling to another kernel."""
    pool = problem.epilogue.pool
    return Support.yes() if pool is None else Support.no(f"supports no pooling in the epilogue, got {pool}")


def transforms_allowed(problem: ConvolutionProblem) -> Support:
    """Refuses numerics `strict`: for engines that compute on transformed tiles (Winograd, FFT).

    Their rounding error is relative to the largest value of a tile, not to the terms of a sum: next to 1e4, a sum of small
    terms may lose every digit. A transform may also overflow where the sum is finite.
    """
    if problem.numerics != "strict":
        return Support.yes()
    return Support.no("rounds relative to the largest value of a tile, which numerics strict forbids")


def compute_dtype(problem: ConvProblem | LinearProblem) -> torch.dtype:
    """The dtype of transforms and sums: fp64 for fp64 storage, else fp32."""
    return torch.float64 if problem.x_spec.dtype == "fp64" else torch.float32


def storage(problem: ConvProblem | LinearProblem) -> torch.dtype:
    """The dtype of x, weight and y."""
    return DTYPES[problem.x_spec.dtype]


def effective_dilation(problem: ConvProblem) -> tuple[int, int]:
    """The dilation, 1 along a side on which the filter has one value and dilation means nothing.

    oneDNN would crash on some such problems: see `known_defects`.
    """
    return (problem.dilation_h if problem.r > 1 else 1), (problem.dilation_w if problem.s > 1 else 1)


def torch_sizes(problem: ConvolutionProblem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Stride, padding, effective dilation and groups, as PyTorch's functions take them after the bias."""
    if isinstance(problem, Conv3dProblem):
        sides = zip(problem.dilation, problem.window, strict=True)
        dilation = tuple(step if window > 1 else 1 for step, window in sides)
        return problem.stride, problem.pad, dilation, problem.groups
    stride, pad = (problem.stride_h, problem.stride_w), (problem.pad_h, problem.pad_w)
    return stride, pad, effective_dilation(problem), problem.groups
