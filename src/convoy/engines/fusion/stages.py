"""Cuts a subgraph that one kernel cannot compute, or not with enough blocks: some values go to the workspace, in fp32.

mean over (h, w) -> layer norm over c      two kernels: the reductions have different rows
max pooling of a max pooling               two: the second reads each element of the first many times
mean of 112x112 pixels of 16 channels      two: sums of parts of each plane, by many blocks, then of the parts
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, cast

from convoy.engines.fusion.lowering import dense_strides
from convoy.engines.fusion.row_sections import RowLayout, rows_of
from convoy.engines.fusion.sections import Result
from convoy.engines.fusion.tensors import (
    Input,
    Interpolated,
    NotFusibleError,
    Reduced,
    Reshaped,
    Tensor,
    Windowed,
    reachable,
)

UNITS: Final = 132
"""Blocks that fill a device: multiprocessors of an H100. A constant, because it decides the size of the workspace."""

_ENOUGH_ELEMENTS: Final = 16384
"""Elements of a block from which more blocks are worth another launch: a multiprocessor reads 32 KB in about a microsecond."""

_MOST_ELEMENTS: Final = 1 << 17
"""Elements of a block beyond which other engines are faster, where a row cannot be cut because one reduction reads another."""

_PART_ELEMENTS: Final = 8192
"""Elements of a block after the cut."""


@dataclass(frozen=True, slots=True)
class WorkspaceCut:
    """Values that a kernel writes to the workspace, and what later kernels compute with in place of others.

    Attributes:
        written: the values, as results.
        replaced: by the identity of a value, what takes its place.
    """

    written: tuple[Result, ...]
    replaced: Mapping[int, Tensor]


def is_reducing(tensor: Tensor) -> bool:
    """Whether a value is computed from reductions."""
    return any(isinstance(each, Reduced) for each in reachable([tensor]))


def ordered_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of dense memory with some dimensions, outermost first; all others have one element."""
    found = [math.prod(shape)] * len(shape)
    for place, dim in enumerate(order):
        found[dim] = math.prod(shape[each] for each in order[place + 1 :])
    return tuple(found)


def pooling_cut(results: Sequence[Result], layout: str, number: int) -> WorkspaceCut | None:
    """The poolings (and bilinear upsamplings) whose results others read; None where there are none.

    Args:
        results: of the subgraph.
        layout: memory format of 4-D values.
        number: how many values are in the workspace already.
    """
    values = reachable([result.tensor for result in results])
    inner: dict[int, Windowed | Interpolated] = {}
    for each in values:
        if isinstance(each, Windowed | Interpolated):
            inner |= {id(one): one for one in _gathers_below(each) if not _gathers_below(one)}
    if not inner:
        return None
    return _written([(each, dense_strides(each.shape, layout)) for each in inner.values()], number)


def _gathers_below(tensor: Windowed | Interpolated) -> list[Windowed | Interpolated]:
    return [each for each in reachable([tensor.of]) if isinstance(each, Windowed | Interpolated)]


def reduction_cut(results: Sequence[Result], number: int) -> WorkspaceCut:
    """The first reductions over the same dimensions of one shape.

    Raises:
        NotFusibleError: there are none.
    """
    found = [each for each in reachable([result.tensor for result in results]) if isinstance(each, Reduced)]
    if not found:
        raise NotFusibleError("computes no such subgraph")
    key = (found[0].of.shape, found[0].dims)
    group: list[Reduced] = []
    for each in found:
        below = [one for one in reachable([each.of]) if isinstance(one, Reduced)]
        if (each.of.shape, each.dims) == key and all(any(one is other for other in group) for one in below):
            group.append(each)
    rows = rows_of(group)
    return _written([(each, ordered_strides(each.shape, rows.kept)) for each in group], number)


def split_cut(rows: RowLayout, blocks: int, number: int) -> WorkspaceCut | None:
    """Reductions of parts, where whole rows are too long for the few blocks that they give; None where they are not.

    Args:
        rows: the rows of a kernel.
        blocks: its blocks.
        number: how many values are in the workspace already.

    Raises:
        NotFusibleError: they are far too long, and cannot be cut.
    """
    elements = rows.count * rows.length // blocks
    nested = any(is_reducing(each.of) for each in rows.reductions)
    if blocks >= UNITS // 2 or elements < _ENOUGH_ELEMENTS:
        return None
    if nested:
        if elements > _MOST_ELEMENTS:
            raise NotFusibleError(f"computes rows of {rows.length} elements in {blocks} blocks, too few to be fast")
        return None
    parts = _parts(rows, max(2, min(elements // _PART_ELEMENTS, 2 * UNITS // blocks)))
    if not parts:
        return None
    dim = rows.inner[0]
    written: list[Result] = []
    replaced: dict[int, Tensor] = {}
    for place, each in enumerate(rows.reductions):
        sides = (*rows.shape[:dim], parts, rows.shape[dim] // parts, *rows.shape[dim + 1 :])
        dims = tuple(old + (old >= dim) for old in each.dims if sides[old + (old >= dim)] > 1)
        partial = Reduced(
            tuple(1 if at in dims else side for at, side in enumerate(sides)), Reshaped(sides, each.of), dims, each.kind
        )
        kept = [dim, *(old + (old > dim) for old in rows.kept)]
        result = _result(partial, ordered_strides(partial.shape, kept), number + place)
        whole = tuple(1 if at == dim else side for at, side in enumerate(partial.shape))
        written.append(result)
        replaced[id(each)] = Reshaped(each.shape, Reduced(whole, _as_input(result), (dim,), each.kind))
    return WorkspaceCut(tuple(written), replaced)


def _parts(rows: RowLayout, wanted: int) -> int:
    """How many parts the outermost dimension of a row is cut into; 0 where it cannot be."""
    side = rows.shape[rows.inner[0]]
    divisors = [each for each in range(2, side + 1) if side % each == 0]
    if len(rows.inner) == 1:  # something must be left to reduce
        divisors = [each for each in divisors if each < side]
    smaller = [each for each in divisors if each <= wanted]
    return smaller[-1] if smaller else min(divisors, default=0)


def _result(tensor: Tensor, strides: tuple[int, ...], number: int) -> Result:
    return Result(f"w{number}", tensor, "fp32", strides)


def _as_input(result: Result) -> Input:
    return Input(result.tensor.shape, result.parameter, result.dtype, result.strides)


def _written(values: Sequence[tuple[Tensor, tuple[int, ...]]], number: int) -> WorkspaceCut:
    """Values that are read from the workspace as they are."""
    results = [_result(tensor, strides, number + place) for place, (tensor, strides) in enumerate(values)]
    return WorkspaceCut(tuple(results), {id(result.tensor): _as_input(result) for result in results})


def substituted(results: Sequence[Result], replaced: Mapping[int, Tensor]) -> list[Result]:
    """Results with some values in place of others."""
    found: dict[int, Tensor] = dict(replaced)
    for tensor in reachable([result.tensor for result in results]):
        if id(tensor) not in found:
            found[id(tensor)] = _with_reads(tensor, found)
    return [replace(result, tensor=found[id(result.tensor)]) for result in results]


def _with_reads(tensor: Tensor, found: Mapping[int, Tensor]) -> Tensor:
    """A value that reads others; itself where nothing changes."""
    if all(found[id(each)] is each for each in tensor.reads()):
        return tensor
    changes: dict[str, Any] = {}
    for each in fields(tensor):
        value = getattr(tensor, each.name)
        if isinstance(value, Tensor):
            changes[each.name] = found[id(value)]
        elif isinstance(value, tuple) and any(isinstance(item, Tensor) for item in cast("tuple[object, ...]", value)):
            changes[each.name] = tuple(found[id(item)] for item in cast("tuple[Tensor, ...]", value))
    return replace(tensor, **changes)
