"""Which convolutions may show a known defect of a library (`known_defects`), by their sizes alone."""

from __future__ import annotations

from convoy.engines.support_checks import effective_dilation
from convoy.problem import Conv3dProblem, ConvolutionProblem, ConvProblem


def no_convolution(problem: ConvolutionProblem) -> bool:
    """Of a defect that is not in such convolutions."""
    del problem
    return False


def fits_into_padding(problem: ConvProblem) -> bool:
    """Whether a dilated filter fits into the padding beside the image."""
    dilation = effective_dilation(problem)[1]
    return dilation > 1 and problem.pad_w >= dilation * (problem.s - 1) + 1


def is_one_channel_a_group(problem: ConvProblem) -> bool:
    """Whether groups of one channel, not depthwise, have one output column behind a stride."""
    truly_depthwise = problem.k == problem.groups > 1
    return problem.groups == problem.c and not truly_depthwise and problem.q == 1 and problem.stride_w > 1


def has_columns_in_padding(problem: ConvProblem) -> bool:
    """Whether some column of the filter lies outside the image for every output."""
    seen = _seen(problem.w, problem.s, problem.q, problem.pad_w, problem.stride_w, problem.dilation_w)
    return any(not any(column) for column in zip(*seen, strict=True))


def has_one_padded_output_column(problem: ConvProblem) -> bool:
    """Whether padding leaves one output column."""
    return problem.q == 1 and problem.pad_w > 0


def has_volume_columns_in_padding(problem: Conv3dProblem) -> bool:
    """Whether some column of the filter lies outside the volume for every output."""
    return any(not any(column) for column in zip(*_seen_of(problem, 2), strict=True))


def has_one_output_column(problem: Conv3dProblem) -> bool:
    """Whether padding or a stride leaves one output column."""
    return problem.y_size[2] == 1 and (problem.pad[2] > 0 or problem.stride[2] > 1)


def is_padded_slice(problem: Conv3dProblem) -> bool:
    """Whether a volume of depth 1 is padded in depth, and has few channels a group."""
    return problem.size[0] == 1 and problem.pad[0] > 0 and problem.c // problem.groups < 16


def sees_padding_alone(problem: Conv3dProblem) -> bool:
    """Whether a filter that is dilated along a side, even one of one value, lies there outside the volume for some output."""
    sides = (side for side in range(3) if problem.dilation[side] > 1)
    return any(not any(taps) for side in sides for taps in _seen_of(problem, side))


def has_unseen_slices(problem: Conv3dProblem) -> bool:
    """Whether a volume of more than 16 columns has slices that no output of a deeper filter sees: their gradient is zero."""
    if problem.size[2] <= 16 or problem.window[0] == 1:
        return False
    starts = range(-problem.pad[0], problem.y_size[0] * problem.stride[0] - problem.pad[0], problem.stride[0])
    seen = {start + tap * problem.dilation[0] for start in starts for tap in range(problem.window[0])}
    return not seen.issuperset(range(problem.size[0]))


def makes_deeper(problem: Conv3dProblem) -> bool:
    """Whether padding in depth is more than keeps the depth of a volume, with a filter that is not dilated and a stride of 1."""
    return 2 * problem.pad[0] > problem.window[0] - 1


def _seen_of(problem: Conv3dProblem, side: int) -> list[list[bool]]:
    sizes = problem.size, problem.window, problem.y_size, problem.pad, problem.stride, problem.dilation
    return _seen(*(size[side] for size in sizes))


def _seen(size: int, window: int, results: int, pad: int, stride: int, dilation: int) -> list[list[bool]]:
    """Along a side, for each output and each value of the filter: whether it lies inside the image."""
    firsts = range(-pad, results * stride - pad, stride)
    return [[0 <= first + tap * dilation < size for tap in range(window)] for first in firsts]
