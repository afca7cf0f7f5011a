"""A convolution with its epilogue as a graph of cuDNN's operations.

Every tensor has a fixed number (its uid), so that a launch can name its buffers without keeping the graph's own objects.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

from convoy.engines.library.cudnn import library
from convoy.problem import Conv3dProblem, ConvolutionProblem, Epilogue

X, WEIGHT, Y, BIAS, RESIDUAL = 101, 102, 103, 104, 105
"""Uids; the frontend gives out its own from 1 on."""

_DTYPES: Final = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BFLOAT16"}

ACTIVATIONS: Final[dict[str, tuple[str, dict[str, float]]]] = {
    "relu": ("relu", {}),
    "relu6": ("relu", {"lower_clip": 0.0, "upper_clip": 6.0}),
    "silu": ("swish", {"swish_beta": 1.0}),
    "sigmoid": ("sigmoid", {}),
    "gelu": ("gelu", {}),
}
"""Activation → pointwise operation and its attributes. Those that cuDNN has no operation for follow as an ATen call."""


def fused_part(epilogue: Epilogue) -> Epilogue:
    """As much of an epilogue as a graph can hold."""
    activation = epilogue.activation if epilogue.activation in ACTIVATIONS else "none"
    return Epilogue(epilogue.bias, epilogue.residual, activation)


def strides(shape: tuple[int, ...], layout: str) -> list[int]:
    """Strides, in elements, of a dense tensor of logical shape [n, c, h, w] or [n, c, d, h, w] in a layout."""
    _, c, *sides = shape
    innermost = c if layout in ("nhwc", "ndhwc") else 1
    pitches = [innermost * prod(sides[index + 1 :]) for index in range(len(sides))]
    return [c * prod(sides), 1 if layout in ("nhwc", "ndhwc") else prod(sides), *pitches]


def sizes_of(problem: ConvolutionProblem) -> dict[str, list[int]]:
    """Padding, stride and dilation as the frontend takes them."""
    if isinstance(problem, Conv3dProblem):
        return {"padding": [*problem.pad], "stride": [*problem.stride], "dilation": [*problem.dilation]}
    return {
        "padding": [problem.pad_h, problem.pad_w],
        "stride": [problem.stride_h, problem.stride_w],
        "dilation": [problem.dilation_h, problem.dilation_w],
    }


def operation_graph(problem: ConvolutionProblem, epilogue: Epilogue) -> Any:
    """A validated graph without plans yet.

    The order conv, residual, bias, activation is that of cuDNN's prebuilt fused kernels; sums and values between the nodes
    are fp32.

    Args:
        problem: the convolution; its own epilogue is ignored.
        epilogue: the fused epilogue.
    """
    frontend = library.load()
    types = frontend.data_type
    dtype = getattr(types, _DTYPES[problem.x_dtype])
    graph = frontend.pygraph(
        io_data_type=dtype,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=library.handle(),
    )

    def tensor(name: str, uid: int, shape: tuple[int, ...]) -> Any:
        layout = "nhwc" if uid == BIAS else problem.layout  # of one pixel: all are the same
        return graph.tensor(dim=list(shape), stride=strides(shape, layout), data_type=dtype, name=name, uid=uid)

    shapes = {X: problem.x_spec.shape, WEIGHT: problem.weight_spec.shape, Y: problem.y_spec.shape}
    sizes = sizes_of(problem)
    if problem.direction == "dgrad":
        result, uid = graph.conv_dgrad(tensor("dy", Y, shapes[Y]), tensor("w", WEIGHT, shapes[WEIGHT]), **sizes), X
    elif problem.direction == "wgrad":
        result, uid = graph.conv_wgrad(tensor("x", X, shapes[X]), tensor("dy", Y, shapes[Y]), **sizes), WEIGHT
    else:
        result, uid = graph.conv_fprop(tensor("x", X, shapes[X]), tensor("w", WEIGHT, shapes[WEIGHT]), **sizes), Y
    if epilogue.residual:
        result = graph.add(result, tensor("residual", RESIDUAL, shapes[Y]))
    if epilogue.bias:
        result = graph.bias(result, tensor("bias", BIAS, (1, problem.k, *(1 for _ in shapes[Y][2:]))))
    if epilogue.activation != "none":
        operation, attributes = ACTIVATIONS[epilogue.activation]
        result = getattr(graph, operation)(result, **attributes)
    result.set_output(True).set_data_type(dtype).set_dim(list(shapes[uid]))
    result.set_stride(strides(shapes[uid], problem.layout)).set_uid(uid)
    graph.validate()
    graph.build_operation_graph()
    return graph
