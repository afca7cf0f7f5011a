"""CUDA C of values that read several elements of another one: poolings and bilinear upsampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Final

from convoy.engines.fusion.code_text import LANE, CodeText, Operand, literal
from convoy.engines.fusion.index_math import Index, Var, number, variable
from convoy.engines.fusion.tensors import Coordinates, Interpolated, Tensor, Windowed

Evaluate = Callable[[Tensor, Coordinates], Operand]
"""Writes the code of a value at coordinates."""

_UNROLLED: Final = 25
"""Positions of a pooling's window up to which its loops are unrolled."""


def windowed(code: CodeText, evaluate: Evaluate, tensor: Windowed, at: Coordinates) -> Operand | None:
    """A pooling: the window's rows, columns and slices each in a loop, without positions in the padding.

    None where the lanes of a vector have different windows.
    """
    sizes, sides = tensor.window.sides, tensor.of.shape[2:]
    starts = [place * stride - pad for place, (_, stride, pad) in zip(at[2:], sizes, strict=True)]
    if code.in_vectors and any(LANE in start.names() for start in starts):
        return None
    maximum = tensor.window.kind == "max"
    found = code.variable(literal(float("-inf")) if maximum else "0.0f")
    _window(code, evaluate, tensor, at, starts, found)
    if not maximum:
        spans = [
            _span(code, start, size, side, pad, counted=tensor.window.counted)
            for start, (size, _, pad), side in zip(starts, sizes, sides, strict=True)
        ]
        code.assign(found, Operand(f"(float)({' * '.join(spans)})"), "op_div")
    return found


def _window(
    code: CodeText, evaluate: Evaluate, tensor: Windowed, at: Coordinates, starts: Sequence[Index], found: Operand
) -> None:
    sizes = [size for size, _, _ in tensor.window.sides]
    operation = "op_maximum" if tensor.window.kind == "max" else "op_add"
    unroll = "UNROLL " if prod(sizes) <= _UNROLLED else ""
    places: list[Index] = []

    def inner(dim: int) -> None:
        if dim == len(sizes):
            code.assign(found, evaluate(tensor.of, (*at[:2], *places)), operation)
            return
        side, step = tensor.of.shape[2 + dim], Var(code.name("r"), sizes[dim])
        with code.block(f"{unroll}for (unsigned {step.name} = 0; {step.name} < {step.size}; ++{step.name})"):
            place = starts[dim] + variable(step)
            where = Var(code.name("p"), side)
            code.line(f"const unsigned {where.name} = {code.index(place)};")
            places.append(variable(where))
            with code.block("" if place.low >= 0 and place.high < side else f"if ({where.name} < {side}u)"):
                inner(dim + 1)
            places.pop()

    inner(0)


def _span(code: CodeText, start: Index, size: int, side: int, pad: int, *, counted: bool) -> str:
    """How many rows or columns of a window an average divides by."""
    low, high = (-pad, side + pad) if counted else (0, side)
    if start.low >= low and start.high + size <= high:
        return str(size)
    first = f"(int)({code.index(start)})"
    return f"(least({first} + {size}, {high}) - most({first}, {low}))"


def interpolated(code: CodeText, evaluate: Evaluate, tensor: Interpolated, at: Coordinates) -> Operand | None:
    """Bilinear upsampling: four neighbours, weighted by their distances. None where the lanes of a vector have different ones."""
    if code.in_vectors and any(LANE in place.names() for place in at[2:]):
        return None
    ends: list[tuple[Index, Index]] = []
    shares: list[str] = []
    for place, scale, side in zip(at[2:], tensor.scales, tensor.of.shape[2:], strict=True):
        if side == 1:
            ends.append((number(0), number(0)))
            shares.append("0.0f")
            continue
        where, first, second, share = (
            code.name("f"),
            Var(code.name("p"), side),
            Var(code.name("p"), side),
            code.name("f"),
        )
        text = f"(float)({code.index(place)})"
        if tensor.align_corners:
            code.line(f"const float {where} = {text} * {literal(scale)};")
        else:
            code.line(f"const float {where} = op_at_least(({text} + 0.5f) * {literal(scale)} - 0.5f, 0.0f);")
        code.line(f"const unsigned {first.name} = least((int){where}, {side - 1});")
        code.line(f"const unsigned {second.name} = least({first.name} + 1, {side - 1});")
        code.line(f"const float {share} = op_at_most({where} - (float){first.name}, 1.0f);")
        ends.append((variable(first), variable(second)))
        shares.append(share)
    corners = [evaluate(tensor.of, (*at[:2], h, w)) for h in ends[0] for w in ends[1]]
    found = code.variable()
    weighted = [f"between({corners[each].element}, {corners[each + 1].element}, {shares[1]})" for each in (0, 2)]
    code.assign(found, Operand(f"between({weighted[0]}, {weighted[1]}, {shares[0]})"))
    return found
