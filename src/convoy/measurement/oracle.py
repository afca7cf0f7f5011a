"""The exact results of a problem in float64, and norms of its sums' terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import grad
from torch.nn.functional import conv2d, conv3d, linear

from convoy.engines.activations import activate, pool2d
from convoy.engines.interpret import compile_graph
from convoy.graph.text import parse_graph
from convoy.measurement.data import (
    Data,
    dense,
    dynamic_constants,
    has_dynamic_weight,
    result_specs,
    with_constant_weight,
)
from convoy.problem import (
    Conv3dProblem,
    ConvolutionProblem,
    LayerProblem,
    LayoutProblem,
    LinearProblem,
    Problem,
    SubgraphProblem,
)
from convoy.typed_torch import l2_norm


def _plain_data(problem: ConvolutionProblem, data: Data) -> Data:
    """The data of a problem with a dynamic weight, with weight and bias as constants."""
    x, *rest = data.args
    count = dynamic_constants(problem)
    return Data((x, *rest[count:]), tuple(rest[:count]))


def oracle(problem: Problem, data: Data) -> list[torch.Tensor]:
    """The problem's results in float64, by PyTorch's float64 arithmetic on the data's device."""
    if has_dynamic_weight(problem):
        return oracle(with_constant_weight(problem), _plain_data(problem, data))
    args = [_double(t) for t in data.args]
    constants = [_double(t) for t in data.constants]
    if isinstance(problem, LayoutProblem):
        return [args[0]]
    if isinstance(problem, SubgraphProblem):
        return list(compile_graph(parse_graph(problem.text), double=True)(args, constants))
    if isinstance(problem, ConvolutionProblem) and problem.direction != "fprop":
        return _gradients(problem, args)
    x, weight = args[0], constants[0]
    if isinstance(problem, LinearProblem):
        y = linear(x, weight)
    else:
        y = (conv3d if isinstance(problem, Conv3dProblem) else conv2d)(x, weight, None, *conv_sizes(problem))
    if problem.epilogue.bias:
        y = y + constants[1].reshape(-1, *[1] * (y.dim() - 2))
    if problem.epilogue.residual:
        y = y + args[1]
    return [pool2d(activate(y, problem.epilogue.activation), problem.epilogue.pool)]


def terms_norm(problem: LayerProblem, data: Data, index: int, power: int) -> float:
    """Norm of the sums of the terms' magnitudes.

    Args:
        problem: a sum of products.
        data: its operands.
        index: which result.
        power: 1 for the sums of |x||weight|, used for cancelling data; 2 for the roots of the sums of squares, the typical
            size of sums of terms with random signs.
    """
    if has_dynamic_weight(problem):
        return terms_norm(with_constant_weight(problem), _plain_data(problem, data), index, power)
    plain = replace(problem, epilogue=replace(problem.epilogue, activation="none"))
    args = tuple(_double(t).abs() ** power for t in data.args)
    constants = tuple(_double(t).abs() ** power for t in data.constants)
    return l2_norm(oracle(plain, Data(args, constants))[index] ** (1 / power))


def spread_norm(problem: LayerProblem, data: Data, index: int) -> float:
    """Norm that the results would have if every output saw the whole filter, from the operands' root mean squares.

    Methods that transform whole tiles spread their rounding over all outputs of a tile, also over those that see mostly
    padding.
    """
    operands = (data.args[0], (*data.constants, *data.args[1:])[0])
    squares = [float(_double(t).square().mean()) if t.numel() else 0.0 for t in operands]
    return math.sqrt(result_specs(problem)[index].elements * problem.reduction_length * squares[0] * squares[1])


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return dense(tensor).double() if tensor.is_floating_point() else tensor


def conv_sizes(problem: ConvolutionProblem) -> tuple[Any, Any, Any, int]:
    """Stride, padding, dilation and groups, as PyTorch's functions take them after the bias."""
    if isinstance(problem, Conv3dProblem):
        return problem.stride, problem.pad, problem.dilation, problem.groups
    stride = (problem.stride_h, problem.stride_w)
    return stride, (problem.pad_h, problem.pad_w), (problem.dilation_h, problem.dilation_w), problem.groups


def _gradients(problem: ConvolutionProblem, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    gradients: Any = grad  # its functions have no complete type annotations
    stride, padding, dilation, groups = conv_sizes(problem)
    volumes = isinstance(problem, Conv3dProblem)
    input_gradient = gradients.conv3d_input if volumes else gradients.conv2d_input
    weight_gradient = gradients.conv3d_weight if volumes else gradients.conv2d_weight
    if problem.direction == "dgrad":
        dy, weight = args
        shape = problem.x_spec.shape
        return [input_gradient(shape, weight, dy, stride, padding, dilation, groups)]
    x, dy = args
    dweight = weight_gradient(x, problem.weight_spec.shape, dy, stride, padding, dilation, groups)
    return [dweight, dy.sum((0, *range(2, dy.dim())))] if problem.epilogue.bias else [dweight]
