"""Pieces around squeeze-and-excitation for kernels of CPUs, as text. Not a test module."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.problem import SubgraphProblem
from tests.unit.engines.banded_cases import ACTIVATIONS, Part, problems

MEANS = {
    "pool": "aten.adaptive_avg_pool2d.default({}, (1, 1))",
    "mean": "aten.mean.dim({}, (2, 3), True)",
    "from the end": "aten.mean.dim({}, (-1, -2), True)",
    "flat": "aten.mean.dim({}, (2, 3))",
}


def gated(
    shape: Sequence[int],
    filters: int,
    *,
    dtype: str = "fp32",
    bias: bool = True,
    residual: bool = False,
    activation: str = "none",
    order: str = "%x, %g",
) -> SubgraphProblem:
    """A product with a gate, and the 1x1 convolution that reads it with its epilogue."""
    n, c, h, w = shape
    image, made = f"{dtype}[{n},{c},{h},{w}]", f"{dtype}[{n},{filters},{h},{w}]"
    lines = ["graph 1", f"input %x: {image}", f"input %g: {dtype}[{n},{c},1,1]"]
    lines += [f"input %r: {made}"] if residual else []
    lines += [f"constant %w: {dtype}[{filters},{c},1,1]", *([f"constant %b: {dtype}[{filters}]"] if bias else [])]
    lines += [f"%s: {image} = aten.mul.Tensor({order})"]
    lines += [f"%y: {made} = conv2d(%s, %w, {'%b' if bias else 'None'}, (1, 1), (0, 0), (1, 1), 1)"]
    last = "%y"
    if residual:
        lines.append(f"%t: {made} = aten.add.Tensor(%y, %r)")
        last = "%t"
    if activation != "none":
        lines.append(f"%a: {made} = {ACTIVATIONS[activation].format(last)}")
        last = "%a"
    return SubgraphProblem("\n".join([*lines, f"return {last}"]) + "\n", "nhwc")


def averaged(shape: Sequence[int], part: Part, mean: str = "pool", *, dtype: str = "fp32") -> SubgraphProblem:
    """A depthwise convolution with its activation, and the mean of the result; raises InputError where it has no output."""
    n, c, h, w = shape
    (layer,) = problems(shape, [part])
    made = f"{dtype}[{n},{c},{layer.p},{layer.q}]"
    lines = ["graph 1", f"input %x: {dtype}[{n},{c},{h},{w}]", f"constant %w: {dtype}[{c},1,{part.side},{part.side}]"]
    lines += [f"constant %b: {dtype}[{c}]"] if part.bias else []
    pairs = ", ".join(f"({size}, {size})" for size in (part.stride, part.pad, part.dilation))
    lines += [f"%y: {made} = conv2d(%x, %w, {'%b' if part.bias else 'None'}, {pairs}, {c})"]
    last = "%y"
    if part.activation != "none":
        lines.append(f"%a: {made} = {ACTIVATIONS[part.activation].format(last)}")
        last = "%a"
    shown = f"{dtype}[{n},{c}]" if mean == "flat" else f"{dtype}[{n},{c},1,1]"
    lines += [f"%m: {shown} = {MEANS[mean].format(last)}", f"return {last}, %m"]
    return SubgraphProblem("\n".join(lines) + "\n", "nhwc")
