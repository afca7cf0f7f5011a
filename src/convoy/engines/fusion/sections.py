"""Parts of a kernel: blocks that compute results element by element. `row_sections` has those with reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from convoy.engines.fusion.code_text import LANE, Operand
from convoy.engines.fusion.emitter import CPP_TYPE, Emitter
from convoy.engines.fusion.index_math import Index, Var, number, taken_apart, variable
from convoy.engines.fusion.lowering import LoweredSubgraph
from convoy.engines.fusion.tensors import Coordinates, Tensor
from convoy.problem import DTYPE_BYTES

VECTOR_BYTES: Final = 16
"""Of the widest loads and stores."""


@dataclass(frozen=True, slots=True)
class KernelSection:
    """Some blocks of a kernel.

    Attributes:
        lines: CUDA C; `block` is the section's own block index.
        blocks: how many.
        by_lane: values that are computed element by element in vectors.
        width: elements of a vector.
    """

    lines: tuple[str, ...]
    blocks: int
    by_lane: int
    width: int


@dataclass(frozen=True, slots=True)
class Result:
    """One result to be written.

    Attributes:
        parameter: the kernel's name of it.
        tensor: its value.
        dtype: its dtype.
        strides: in elements.
    """

    parameter: str
    tensor: Tensor
    dtype: str
    strides: tuple[int, ...]

    def address(self, at: Coordinates) -> Index:
        """Where an element lies."""
        found = number(0)
        for place, stride in zip(at, self.strides, strict=True):
            found = found + place * stride
        return found

    @property
    def order(self) -> list[int]:
        """Its dimensions of more than one element, as they lie in memory, the innermost last."""
        shape = self.tensor.shape
        return sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: -self.strides[dim])


def results_of(lowered: LoweredSubgraph) -> list[Result]:
    """The results with their parameters' names."""
    rows = zip(lowered.results, lowered.result_specs, lowered.result_strides, strict=True)
    return [Result(f"y{place}", tensor, spec.dtype, strides) for place, (tensor, spec, strides) in enumerate(rows)]


def widths(results: Sequence[Result]) -> list[int]:
    """Vector widths to try, the widest first."""
    widest = VECTOR_BYTES // min(DTYPE_BYTES[result.dtype] for result in results)
    return [width for width in (8, 4, 2, 1) if width <= widest]


def store(code: Emitter, result: Result, at: Coordinates, value: Operand) -> None:
    """Write a value, as a vector if its elements are consecutive."""
    address = result.address(at)
    if code.width == 1 or LANE not in address.names():
        code.line(f"{result.parameter}[{code.index(address)}] = from_float<{CPP_TYPE[result.dtype]}>({value.element});")
        return
    first = code.first_of_vector(address)
    if first is None:
        code.by_lane += 1
        with code.lanes():
            code.line(
                f"{result.parameter}[{code.index(address)}] = from_float<{CPP_TYPE[result.dtype]}>({value.element});"
            )
        return
    if not value.vector:
        wide = Operand(code.name("v"), vector=True)
        code.line(f"float {wide.text}[{code.width}];")
        code.assign(wide, value)
        value = wide
    code.line(f"store({result.parameter} + ({code.index(first)}), {value.text});")


def loop_sections(results: Sequence[Result], threads: int) -> list[KernelSection]:
    """Results of one shape and order together, each thread with one vector of each."""
    groups: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        groups.setdefault((result.tensor.shape, result.strides), []).append(result)
    return [_widest(group, threads) for group in groups.values()]


def _widest(group: Sequence[Result], threads: int) -> KernelSection:
    """The widest vectors without values that are computed one by one."""
    elements = math.prod(group[0].tensor.shape)
    tried = (_loop(group, width, threads) for width in widths(group) if elements % width == 0)
    return next(section for section in tried if not section.by_lane)


def _loop(group: Sequence[Result], width: int, threads: int) -> KernelSection:
    code = Emitter(width)
    first = group[0]
    shape, order = first.tensor.shape, first.order
    count = math.prod(shape) // width
    turn = Var("i", count)
    position = variable(turn) * width + variable(Var(LANE, width))
    parts = taken_apart(position, [shape[dim] for dim in order])
    at = tuple(parts[order.index(dim)] if dim in order else number(0) for dim in range(len(shape)))
    code.line(f"const unsigned i = block * {threads}u + thread_index();")
    with code.block(f"if (i < {count}u)"):
        for result in group:
            store(code, result, at, code.evaluate(result.tensor, at))
    return KernelSection(tuple(code.lines), -(-count // threads), code.by_lane, width)
