"""Pieces of the graph that are convolutions one after the other, as text. Not a test module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.problem import ConvProblem, Epilogue, SubgraphProblem

ACTIVATIONS = {
    "relu": "aten.relu.default({})",
    "relu6": "aten.hardtanh.default({}, 0, 6)",
    "silu": "aten.silu.default({})",
    "hardswish": "aten.hardswish.default({})",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A convolution behind another: filters (0: one for each channel), side, stride, padding, dilation, what follows, a bias."""

    k: int = 0
    side: int = 1
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    activation: str = "none"
    bias: bool = True


def problems(shape: Sequence[int], parts: Sequence[Part], *, residual: bool = False) -> list[ConvProblem]:
    """The convolutions by themselves; the last one adds a residual where one is wanted."""
    n, c, h, w = shape
    found: list[ConvProblem] = []
    for part in parts:
        epilogue = Epilogue(part.bias, residual and part is parts[-1], part.activation)
        problem = ConvProblem(
            n, c, h, w, part.k or c, part.side, part.side, part.pad, part.pad, part.stride, part.stride, part.dilation,
            part.dilation, 1 if part.k else c, layout="nhwc", numerics="strict", epilogue=epilogue,
        )  # fmt: skip
        found.append(problem)
        c, h, w = problem.k, problem.p, problem.q
    return found


def piece(
    shape: Sequence[int], parts: Sequence[Part], *, residual: bool = False, dtype: str = "fp32"
) -> SubgraphProblem:
    """The convolutions as one piece in nhwc; raises InputError where one has no output."""
    chain = problems(shape, parts, residual=residual)
    values, constants, nodes = [f"input %x: {_type(dtype, shape)}"], list[str](), list[str]()
    last = "%x"
    for i, problem in enumerate(chain):
        made = _type(dtype, (problem.n, problem.k, problem.p, problem.q))
        constants.append(f"constant %w{i}: {_type(dtype, problem.weight_spec.shape)}")
        if problem.epilogue.bias:
            constants.append(f"constant %b{i}: {dtype}[{problem.k}]")
        sizes = (problem.stride_h, problem.pad_h, problem.dilation_h)
        pairs = ", ".join(f"({size}, {size})" for size in sizes)
        bias = f"%b{i}" if problem.epilogue.bias else "None"
        nodes.append(f"%y{i}: {made} = conv2d({last}, %w{i}, {bias}, {pairs}, {problem.groups})")
        last = f"%y{i}"
        if problem.epilogue.residual:
            values.append(f"input %r: {made}")
            nodes.append(f"%s: {made} = aten.add.Tensor({last}, %r)")
            last = "%s"
        if problem.epilogue.activation != "none":
            nodes.append(f"%a{i}: {made} = {ACTIVATIONS[problem.epilogue.activation].format(last)}")
            last = f"%a{i}"
    return SubgraphProblem("\n".join(["graph 1", *values, *constants, *nodes, f"return {last}"]) + "\n", "nhwc")


def inverted(c: int, wide: int, k: int, *, side: int = 3, stride: int = 1, activation: str = "relu6") -> list[Part]:
    """MobileNetV2's block of c channels, `wide` inside, k behind."""
    middle = Part(0, side, stride, side // 2, activation=activation)
    return [Part(wide, activation=activation), middle, Part(k)] if wide != c else [middle, Part(k)]


def _type(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
