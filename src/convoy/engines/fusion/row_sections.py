"""Sections of a kernel with reductions: threads share the elements of a row, or of some rows that lie side by side.

*Rows* are what is reduced to one number each. Where a row's elements lie side by side (layer norm, a mean of nchw planes), a
group of threads takes a row and reads vectors along it. Where the rows lie side by side (a mean of nhwc pixels), a
thread takes a vector of rows, and threads share the elements of each. A result of the rows' size is written once; one of all
elements' size in a second pass, whose values the compiler keeps in registers if each thread has one vector of them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from convoy.engines.fusion.code_text import LANE, Operand, literal
from convoy.engines.fusion.emitter import Emitter, KnownReduction
from convoy.engines.fusion.index_math import Index, Var, number, taken_apart, variable
from convoy.engines.fusion.sections import KernelSection, Result, store, widths
from convoy.engines.fusion.tensors import Coordinates, NotFusibleError, Reduced, Tensor, reachable

MOST_THREADS: Final = 512
"""Threads of a block that share a row."""

_IDENTITY: Final = {"sum": "0.0f", "max": literal(float("-inf"))}
_OPERATION: Final = {"sum": ("Sum", "op_add"), "max": ("Max", "op_maximum")}


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How the elements of all rows lie.

    Attributes:
        reductions: all reductions of the kernel, in the order in which they are computed.
        shape: sides of what is reduced.
        kept: its dimensions that number the rows, as they lie in memory.
        inner: its dimensions that number a row's elements, as they lie in memory.
        along: whether a row's elements, rather than rows, lie side by side.
    """

    reductions: tuple[Reduced, ...]
    shape: tuple[int, ...]
    kept: tuple[int, ...]
    inner: tuple[int, ...]
    along: bool

    @property
    def count(self) -> int:
        """Number of rows."""
        return math.prod(self.shape[dim] for dim in self.kept)

    @property
    def length(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[dim] for dim in self.inner)

    def coordinates(self, row: Index, element: Index) -> Coordinates:
        """Of an element of a row."""
        kept = dict(zip(self.kept, taken_apart(row, [self.shape[dim] for dim in self.kept]), strict=True))
        inner = dict(zip(self.inner, taken_apart(element, [self.shape[dim] for dim in self.inner]), strict=True))
        return tuple((kept | inner).get(dim, number(0)) for dim in range(len(self.shape)))


@dataclass(frozen=True, slots=True)
class Shares:
    """How a block's threads share the work: `count` threads, `stride` apart, have the same rows.

    Attributes:
        width: elements of a vector.
        threads: of a block.
        stride: between threads that share a row.
        count: threads that share a row.
        rows: rows, or vectors of rows, of a block.
    """

    width: int
    threads: int
    stride: int
    count: int
    rows: int


def rows_of(tensors: Sequence[Tensor]) -> RowLayout:
    """What values with reductions have in common.

    Raises:
        NotFusibleError: reductions of different rows.
    """
    reductions = tuple(each for each in reachable(tensors) if isinstance(each, Reduced))
    shape, dims = reductions[0].of.shape, reductions[0].dims
    if any((each.of.shape, each.dims) != (shape, dims) for each in reductions):
        raise NotFusibleError("computes reductions over the same dimensions of one shape in a kernel")
    probe = Emitter(1, probing=True)
    at = tuple(variable(Var(f"d{dim}", side)) for dim, side in enumerate(shape))
    for each in reductions:
        probe.evaluate(each.of, at)
    if not probe.loads:
        raise NotFusibleError("reduces values that are in memory")
    tensor, address = max(probe.loads, key=lambda load: math.prod(load[0].shape))
    del tensor
    factors = {dim: address.factor(f"d{dim}") for dim, side in enumerate(shape) if side > 1}
    order = sorted(factors, key=lambda dim: -(factors[dim] or 0))
    along = any(factors[dim] == 1 for dim in dims) or not any(factors[dim] == 1 for dim in order)
    return RowLayout(
        reductions,
        shape,
        tuple(dim for dim in order if dim not in dims),
        tuple(dim for dim in order if dim in dims),
        along,
    )


def row_section(rows: RowLayout, results: Sequence[Result], units: int) -> tuple[KernelSection, int]:
    """A section for results that read reductions, and the threads of its blocks.

    Args:
        rows: their rows.
        results: all of them.
        units: multiprocessors of the device, which blocks should fill.

    Raises:
        NotFusibleError: results whose elements do not belong to rows.
    """
    side = rows.shape[(rows.inner if rows.along else rows.kept or rows.inner)[-1]]
    found: tuple[KernelSection, int] | None = None
    for width in [each for each in widths(results) if side % each == 0]:
        shares = _along(rows, width) if rows.along else _across(rows, width, units)
        found = _RowWriter(rows, shares).section(results), shares.threads
        if not found[0].by_lane:
            return found
    assert found is not None
    return found


def _power(number_: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(0, number_ - 1).bit_length()


def _along(rows: RowLayout, width: int) -> Shares:
    """A group of threads for each row, as many as it has vectors."""
    count = min(_power(-(-rows.length // width)), MOST_THREADS)
    threads = max(128, count) if count <= 32 else count
    return Shares(width, threads, 1, count, threads // count)


def _across(rows: RowLayout, width: int, units: int) -> Shares:
    """A thread for each vector of rows, and as many again as share their elements."""
    vectors = rows.count // width
    columns = min(32, _power(vectors))
    while columns > 2 and -(-vectors // columns) < units:
        columns //= 2
    count = max(1, min(_power(rows.length), MOST_THREADS // columns))
    if columns * count < 32:
        count = 32 // columns
    return Shares(width, columns * count, columns, count, columns)


class _RowWriter:
    """Writes one section."""

    def __init__(self, rows: RowLayout, shares: Shares) -> None:
        self.rows, self.shares = rows, shares
        self.code = Emitter(shares.width)
        along, width = rows.along, shares.width
        self.vectors = rows.length // width if along else rows.length
        self.groups = rows.count if along else rows.count // width
        self.once = self.vectors <= shares.count
        lane = variable(Var(LANE, width))
        row, element = variable(Var("row", self.groups)), variable(Var("e", self.vectors))
        row, element = (row, element * width + lane) if along else (row * width + lane, element)
        self.at = rows.coordinates(row, element)
        self.kept_at = tuple(number(0) if dim in rows.inner else place for dim, place in enumerate(self.at))

    def section(self, results: Sequence[Result]) -> KernelSection:
        """All of it."""
        code, shares = self.code, self.shares
        self._begin()
        for reduction in self.rows.reductions:
            self._reduce(reduction)
        placed = [(result, *self._place(result)) for result in results]
        kept = [(result, at) for result, at, whole in placed if not whole]
        whole = [(result, at) for result, at, whole in placed if whole]
        if kept:
            first = "part == 0u" + (" && live" if self._may_end else "")
            self._write(kept, first)
        if whole:
            with self._elements():
                inside = [f"part < {self.vectors}u"] if self.once and self.vectors < shares.count else []
                inside += ["live"] if self._may_end else []
                self._write(whole, " && ".join(inside))
        return KernelSection(tuple(code.lines), -(-self.groups // shares.rows), code.by_lane, shares.width)

    @property
    def _may_end(self) -> bool:
        """Whether the last block has fewer rows than others."""
        return self.groups % self.shares.rows != 0

    def _begin(self) -> None:
        """The thread's row and its place among those that share it. Threads without a row take the last one."""
        code, shares = self.code, self.shares
        if shares.count * shares.stride > 32:
            numbers = 1 if self.rows.along else shares.width
            code.line(f"SHARED float shared[{shares.threads // 32 * shares.stride * numbers}];")
        else:
            code.line("float* shared = nullptr;")
        split = (
            (f"/ {shares.count}u", f"% {shares.count}u")
            if shares.stride == 1
            else (f"% {shares.stride}u", f"/ {shares.stride}u")
        )
        code.line(f"const unsigned wanted = block * {shares.rows}u + thread_index() {split[0]};")
        code.line(f"const unsigned part = thread_index() {split[1]};")
        if self._may_end:
            code.line(f"const bool live = wanted < {self.groups}u;")
            code.line(f"const unsigned row = live ? wanted : {self.groups - 1}u;")
        else:
            code.line("const unsigned row = wanted;")
        if self.once:
            code.line(f"const unsigned e = part < {self.vectors}u ? part : {self.vectors - 1}u;")

    @contextmanager
    def _elements(self) -> Generator[None]:
        """For each of the thread's vectors of a row: only one, or a loop."""
        if self.once:
            yield
        else:
            with self.code.block(f"UNROLL_4 for (unsigned e = part; e < {self.vectors}u; e += {self.shares.count}u)"):
                yield

    def _reduce(self, reduction: Reduced) -> None:
        """One reduction of every row, over the thread's own elements, then over the threads."""
        code, shares = self.code, self.shares
        across = not self.rows.along and shares.width > 1
        structure, operation = _OPERATION[reduction.kind]
        total = Operand(code.name("r"), across)
        code.line(f"float {total.text}{f'[{shares.width}]' if across else ''};")
        code.assign(total, Operand(_IDENTITY[reduction.kind]))
        with self._elements():
            value = code.evaluate(reduction.of, self.at)
            partial = self.once and self.vectors < shares.count
            with code.block(f"if (part < {self.vectors}u)" if partial else ""):
                if across or shares.width == 1:
                    code.assign(total, value, operation)
                else:
                    code.line(code.each_lane())
                    code.line(f"  {total.text} = {operation}({total.text}, {value.element});")
        code.line(f"reduce<{structure}, {shares.stride}, {shares.count}>({total.text}, shared);")
        code.reductions[id(reduction)] = KnownReduction(self.kept_at, total)

    def _write(self, results: Sequence[tuple[Result, Coordinates]], condition: str) -> None:
        """Evaluate results and store them under a condition."""
        code = self.code
        with code.block(f"if ({condition})" if condition else ""):
            for result, at in results:
                store(code, result, at, code.evaluate(result.tensor, at))

    def _place(self, result: Result) -> tuple[Coordinates, bool]:
        """A result's coordinates in terms of the row and the element, and whether it has one value for each element."""
        probe = Emitter(1, probing=True)
        own = tuple(variable(Var(f"t{dim}", side)) for dim, side in enumerate(result.tensor.shape))
        probe.evaluate(result.tensor, own)
        found: dict[str, Index] = {}
        for _, at in probe.reads:
            for dim in self.rows.kept:
                var = at[dim].sole_variable()
                if var is None or found.setdefault(var.name, self.at[dim]) != self.at[dim]:
                    raise NotFusibleError("needs results whose elements belong to one row each")
        if len(found) != len(self.rows.kept):
            raise NotFusibleError("needs results whose elements belong to one row each")
        rest = [f"t{dim}" for dim, side in enumerate(result.tensor.shape) if side > 1 and f"t{dim}" not in found]
        sides = [side for dim, side in enumerate(result.tensor.shape) if f"t{dim}" in rest]
        inner = sorted(self.rows.inner)
        if rest and sides != [self.rows.shape[dim] for dim in inner]:
            raise NotFusibleError("needs results of one value for each row, or for each of its elements")
        found |= {name: self.at[dim] for name, dim in zip(rest, inner, strict=False)} if rest else {}
        return tuple(place.substituted(found) for place in own), bool(rest)
