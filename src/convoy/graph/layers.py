"""The problem of a layer's node: sizes and dtypes, without a region's additions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from convoy.errors import InputError
from convoy.graph.ir import VOLUME_GRADIENTS, Arg, Graph, Node
from convoy.problem import Conv3dProblem, ConvProblem, LayerProblem, LinearProblem


def conv_problem(graph: Graph, node: Node) -> ConvProblem:
    """The problem of a `conv2d` node, without epilogue; x, weight and y have the dtype of x.

    Raises:
        InputError: the arguments describe no convolution.
    """
    x, weight = (graph.values[name].spec for name in list(node.refs())[:2])
    if len(x.shape) != 4 or len(weight.shape) != 4:
        raise InputError("shape", (x.shape, weight.shape), "x and weight with four sides each")
    stride, pad, dilation = (pair(arg) for arg in node.args[3:6])
    n, c, h, w = x.shape
    k, _, r, s = weight.shape
    groups = node.args[6]
    return ConvProblem(
        *(n, c, h, w, k, r, s, *pad, *stride, *dilation),
        groups=groups if isinstance(groups, int) else 0,
        x_dtype=x.dtype,
        weight_dtype=x.dtype,
        y_dtype=x.dtype,
        acc_dtype="fp64" if x.dtype == "fp64" else "fp32",
    )


def gradient_problem(graph: Graph, node: Node) -> ConvProblem:
    """The problem of a `conv2d_dgrad` or `conv2d_wgrad` node; all its values have the dtype of the first.

    Raises:
        InputError: the arguments describe no gradient of a convolution.
    """
    first, second = (graph.values[name].spec for name in list(node.refs())[:2])
    if len(first.shape) != 4 or len(second.shape) != 4:
        raise InputError("shape", (first.shape, second.shape), "two values with four sides each")
    size, stride, pad, dilation = (pair(arg) for arg in node.args[2:6])
    groups = node.args[6] if isinstance(node.args[6], int) else 0
    if node.op == "conv2d_dgrad":
        n, k = first.shape[:2]
        c, (h, w), (r, s) = second.shape[1] * groups, size, second.shape[2:]
    else:
        (n, c, h, w), k, (r, s) = first.shape, second.shape[1], size
    return ConvProblem(
        *(n, c, h, w, k, r, s, *pad, *stride, *dilation),
        groups=groups,
        x_dtype=first.dtype,
        weight_dtype=first.dtype,
        y_dtype=first.dtype,
        acc_dtype="fp64" if first.dtype == "fp64" else "fp32",
        direction=node.op.removeprefix("conv2d_"),
    )


def conv3d_problem(graph: Graph, node: Node) -> Conv3dProblem:
    """The problem of a `conv3d` node, without epilogue; x, weight and y have the dtype of x.

    Raises:
        InputError: the arguments describe no convolution.
    """
    x, weight = (graph.values[name].spec for name in list(node.refs())[:2])
    if len(x.shape) != 5 or len(weight.shape) != 5:
        raise InputError("shape", (x.shape, weight.shape), "x and weight with five sides each")
    stride, pad, dilation = (triple(arg) for arg in node.args[3:6])
    groups = node.args[6] if isinstance(node.args[6], int) else 0
    (n, c, *size), (k, _, *window) = x.shape, weight.shape
    return Conv3dProblem(n, c, triple(size), k, triple(window), pad, stride, dilation, groups, dtype=x.dtype)


def gradient3d_problem(graph: Graph, node: Node) -> Conv3dProblem:
    """The problem of a `conv3d_dgrad` or `conv3d_wgrad` node; all its values have the dtype of the first.

    Raises:
        InputError: the arguments describe no gradient of a convolution.
    """
    first, second = (graph.values[name].spec for name in list(node.refs())[:2])
    if len(first.shape) != 5 or len(second.shape) != 5:
        raise InputError("shape", (first.shape, second.shape), "two values with five sides each")
    sides, stride, pad, dilation = (triple(arg) for arg in node.args[2:6])
    groups = node.args[6] if isinstance(node.args[6], int) else 0
    if node.op == "conv3d_dgrad":
        (n, k), c, size, window = first.shape[:2], second.shape[1] * groups, sides, triple(second.shape[2:])
    else:
        (n, c), k, size, window = first.shape[:2], second.shape[1], triple(first.shape[2:]), sides
    direction = node.op.removeprefix("conv3d_")
    return Conv3dProblem(n, c, size, k, window, pad, stride, dilation, groups, dtype=first.dtype, direction=direction)


def linear_problem(graph: Graph, node: Node) -> LinearProblem:
    """The problem of a `linear` node, without epilogue: the leading dimensions of x are its rows.

    Raises:
        InputError: the arguments describe no linear layer.
    """
    x, weight = (graph.values[name].spec for name in list(node.refs())[:2])
    formatted = (4, 5) if graph.has_volumes else (4,)
    if len(x.shape) in (0, 1, *formatted) or len(weight.shape) != 2:
        raise InputError(
            "shape", (x.shape, weight.shape), "x with two sides or more, but not four, and weight with two"
        )
    return LinearProblem(math.prod(x.shape[:-1]), x.shape[-1], k=weight.shape[0], dtype=x.dtype)


def layer_problem(graph: Graph, node: Node) -> LayerProblem:
    """The problem of a convolution, a gradient of one, or a linear layer (a node of `LAYERS`), without epilogue.

    Raises:
        InputError: the arguments describe no such layer.
    """
    if node.op == "linear":
        return linear_problem(graph, node)
    if node.op == "conv2d":
        return conv_problem(graph, node)
    if node.op == "conv3d":
        return conv3d_problem(graph, node)
    return gradient3d_problem(graph, node) if node.op in VOLUME_GRADIENTS else gradient_problem(graph, node)


def is_integer(arg: Arg) -> bool:
    """Whether an argument is an integer, and no flag."""
    return isinstance(arg, int) and not isinstance(arg, bool)


def is_pair(arg: Arg) -> bool:
    """Whether an argument is a pair of integers."""
    return isinstance(arg, tuple) and len(arg) == 2 and all(map(is_integer, arg))


def is_triple(arg: Arg) -> bool:
    """Whether an argument is three integers."""
    return isinstance(arg, tuple) and len(arg) == 3 and all(map(is_integer, arg))


def triple(arg: Arg | Sequence[int]) -> tuple[int, int, int]:
    """Three integers; InputError for anything else."""
    if isinstance(arg, (tuple, list)) and len(arg) == 3:
        first, second, third = arg
        if isinstance(first, int) and isinstance(second, int) and isinstance(third, int):
            return first, second, third
    raise InputError("argument", arg, "three integers")


def pair(arg: Arg) -> tuple[int, int]:
    """A pair of integers; InputError for anything else."""
    if isinstance(arg, tuple) and len(arg) == 2:
        first, second = arg
        if isinstance(first, int) and isinstance(second, int):
            return first, second
    raise InputError("argument", arg, "a pair of integers")
