"""What the engines that are made of torch's own operations refuse, and why: the conditions that they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.operators import DTYPES
from convoy.problem import ConvProblem, LinearProblem, Problem
from convoy.support import Support


def plain_convolution(problem: Problem, directions: Sequence[str] = ("fprop",), *, pools: bool = False) -> Support:
    """Whether a problem is a convolution on ordinary tensors of one dtype, in one of these directions.

    Args:
        problem: anything.
        directions: the directions that the engine computes.
        pools: whether the engine does an epilogue's pooling.
    """
    if not isinstance(problem, ConvProblem):
        return Support.no(f"does convolutions only, got {type(problem).__name__}")
    if problem.layout == "blocked":
        return Support.no("takes nchw and nhwc tensors, got blocked")
    dtypes = {problem.x_dtype, problem.weight_dtype, problem.y_dtype}
    if len(dtypes) != 1:
        return Support.no(f"needs x, weight and y of one dtype, got {', '.join(sorted(dtypes))}")
    if problem.acc_dtype == "fp64" and problem.x_dtype != "fp64":
        return Support.no("keeps sums in fp32, got acc_dtype fp64")
    if not pools and not (unpooled := without_pooling(problem)):
        return unpooled
    if problem.direction not in directions:
        return Support.no(f"computes {' and '.join(directions)}, got {problem.direction}")
    if problem.direction == "dgrad" and problem.epilogue:
        return Support.no(f"a data gradient has no epilogue, got {problem.epilogue}")
    if problem.direction == "wgrad" and (problem.epilogue.residual or problem.epilogue.activation != "none"):
        return Support.no(f"a weight gradient has no epilogue but the bias's, got {problem.epilogue}")
    return Support.yes()


def without_pooling(problem: ConvProblem) -> Support:
    """No, where the epilogue pools: for every engine that leaves the pooling to a kernel of its own."""
    pool = problem.epilogue.pool
    return Support.yes() if pool is None else Support.no(f"has no pooling in its epilogue, got {pool}")


def compute_dtype(problem: ConvProblem | LinearProblem) -> torch.dtype:
    """The dtype of transforms and sums: fp64 for fp64 storage, else fp32."""
    return torch.float64 if problem.x_spec.dtype == "fp64" else torch.float32


def storage(problem: ConvProblem | LinearProblem) -> torch.dtype:
    """The dtype of x, weight and y."""
    return DTYPES[problem.x_spec.dtype]


def effective_dilation(problem: ConvProblem) -> tuple[int, int]:
    """The dilation, 1 along a side on which the filter has one value and dilation means nothing.

    oneDNN would crash on some such problems: see `onednn_defect`.
    """
    return (problem.dilation_h if problem.r > 1 else 1), (problem.dilation_w if problem.s > 1 else 1)


def onednn_defect(problem: ConvProblem) -> str:
    """What is wrong with oneDNN's convolution on a problem, as a phrase; empty where nothing is.

    These defects were found by fuzzing PyTorch 2.11 (oneDNN 3.10) and 2.13 (3.12), and reach `torch.conv2d` in channels_last:

    - It crashes where a dilated filter fits into the padding beside the image, with a stride: 1 channel of 9x2, filter 3x2,
      padding 4, stride 3, dilation 3 along the width.
    - It gives wrong numbers where a group has one channel, is not depthwise, and a stride leaves one output column: 1
      channel of 5x3, 4 filters of 3x3, padding (2, 1), stride 5 along the width.
    - It leaves the bf16 weight gradient of filter columns unwritten that see padding alone: 2 channels of 9x1, 6 filters of
      3x3, padding 1, stride 5.
    """
    if problem.direction != "fprop":
        unwritten = problem.direction == "wgrad" and problem.x_dtype == "bf16" and _has_columns_in_padding(problem)
        return "leaves bf16 weight gradients of filter columns unwritten that see padding alone" if unwritten else ""
    extent = effective_dilation(problem)[1] * (problem.s - 1) + 1
    if effective_dilation(problem)[1] > 1 and problem.pad_w >= extent:
        return f"crashes where a dilated filter ({extent} wide) fits into the padding ({problem.pad_w})"
    truly_depthwise = problem.k == problem.groups > 1
    if problem.groups == problem.c and not truly_depthwise and problem.q == 1 and problem.stride_w > 1:
        return "is wrong for one channel a group, not depthwise, where a stride leaves one output column"
    return ""


def _has_columns_in_padding(problem: ConvProblem) -> bool:
    """Whether some column of the filter meets no column of the image, whatever the output."""
    firsts = range(-problem.pad_w, problem.q * problem.stride_w - problem.pad_w, problem.stride_w)
    columns = range(0, problem.s * problem.dilation_w, problem.dilation_w)
    return any(all(not 0 <= first + column < problem.w for first in firsts) for column in columns)
