"""SizePrograms: which sizes of a model have programs, how long each takes, and which of them compute a call of other sizes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from convoy.dynamic.batch_split import BatchSplit, buckets, cheapest_split
from convoy.dynamic.dims import DynamicDims
from convoy.errors import InputError
from convoy.plan import PlansForSizes, SizedPlan
from convoy.program import calls
from convoy.program.call_forms import Arrangement
from convoy.program.program_cache import ProgramCache
from convoy.program.shared_memory import SharedMemory

Sizes = tuple[int, ...]
"""A size for each range of `DynamicDims`."""

MOST_ROUTES: Final = 4096
"""Forms and sizes of calls whose splits are remembered."""

MOST_SEEN: Final = 1000
"""Sizes that are counted until `improve` makes programs for them."""


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Consecutive images of a call, and the program that computes them.

    Attributes:
        start: the first image.
        count: how many of the call's images.
        batch: images that the program computes; more than `count` if it is padded.
        signature: of a call that the program was made for.
    """

    start: int
    count: int
    batch: int
    signature: calls.Signature


@dataclass(frozen=True, slots=True)
class Route:
    """How a call without a program of its own is computed.

    Attributes:
        sizes: its sizes; None if it is not like the example within the ranges.
        arrangement: brings its arguments into the example's form; None: they have it.
        parts: what computes it; empty: the stock module.
        reason: why the stock module does, for the user; empty if that needs no warning.
    """

    sizes: Sizes | None = None
    arrangement: Arrangement | None = None
    parts: tuple[BatchPart, ...] = ()
    reason: str = ""


class SizePrograms:
    """Programs by sizes. One object, so that a snapshot of a larger module does not take it for state.

    Args:
        dims: the dimensions that may change.
        example: the example, without its values.
        not_split: why batches must not be split or padded; empty if they may be.
        memory: what the programs share.

    Attributes:
        times_ms: milliseconds of one call, by sizes, of each program or, where that is the baseline, the stock module.
        routes: how calls without a program of their own are computed, by signature.
        seen: how often sizes without a program were called.
    """

    def __init__(
        self, dims: DynamicDims, example: calls.CallExample, not_split: str, memory: SharedMemory | None = None
    ) -> None:
        self.dims, self.example, self.not_split = dims, example, not_split
        self.memory = memory or SharedMemory()
        self.times_ms: dict[Sizes, float] = {}
        self.routes: dict[calls.Signature, Route] = {}
        self.seen: Counter[Sizes] = Counter()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold no routes: they are found again."""
        return _restored, (self.dims, self.example, self.not_split, self.memory, self.times_ms)

    def __deepcopy__(self, memo: dict[int, Any]) -> SizePrograms:
        """A copy with times of its own; the programs are shared, and so is their memory."""
        return _restored(self.dims, self.example, self.not_split, self.memory, dict(self.times_ms))

    def take(self, sizes: Sizes, time_ms: float) -> None:
        """A program for these sizes takes this long; calls find their routes anew."""
        with self._lock:
            self.times_ms[sizes] = time_ms
            self.seen.pop(sizes, None)
            self.routes = {}

    def renew(self, example: calls.CallExample, not_split: str, memory: SharedMemory | None = None) -> None:
        """For a module that was changed: another example, and whether its batches may be split; calls find their routes anew."""
        with self._lock:
            self.example, self.not_split, self.routes = example, not_split, {}
            self.memory = memory or SharedMemory()

    def note(self, sizes: Sizes) -> None:
        """Count a call of sizes without a program."""
        with self._lock:
            if sizes in self.seen or len(self.seen) < MOST_SEEN:
                self.seen[sizes] += 1

    def keep(self, signature: calls.Signature, route: Route) -> None:
        """Remember a route."""
        with self._lock:
            if len(self.routes) >= MOST_ROUTES:
                self.routes = {}
            self.routes[signature] = route

    def split(self, sizes: Sizes) -> BatchSplit | None:
        """The cheapest programs that together compute a call; None if none may, or there are none for its other sizes."""
        same = {have[0]: time for have, time in self.times_ms.items() if have[1:] == sizes[1:]}
        if self.dims.batch is None or self.not_split or not same:
            return None
        return cheapest_split(sizes[0], same)

    def wanted(self, sizes: object) -> list[Sizes]:
        """The sizes of the programs that `add_size` makes.

        Raises:
            InputError: a dimension that may not change, or a size out of its range.
        """
        dims = self.dims
        given = {0: sizes} if isinstance(sizes, int) else sizes
        if not isinstance(given, Mapping) or not given:
            raise InputError("sizes", sizes, "sizes by dimension, such as {2: 256, 3: 256}, or a batch size")
        by_dim = dict(cast("Mapping[Any, Any]", given))
        found = list(dims.example)
        for index, one in enumerate(dims.ranges):
            size = by_dim.pop(one.dim, found[index])
            if not isinstance(size, int) or isinstance(size, bool) or not one.least <= size <= one.most:
                raise InputError(f"sizes[{one.dim}]", size, f"a size from {one.least} to {one.most}")
            found[index] = size
        if by_dim:
            names = ", ".join(str(one.dim) for one in dims.ranges)
            raise InputError("sizes", next(iter(by_dim)), f"a dimension that may change: {names}")
        rest = tuple(found[1:])
        if dims.batch is None or 0 in given or self.not_split:
            return [tuple(found)]
        return [(images, *rest) for images in buckets(dims.batch.least, dims.batch.most, dims.batch.example)]

    def with_plans(self, cache: ProgramCache) -> PlansForSizes:
        """All of it as data, with the programs' plans."""
        programs: list[SizedPlan] = []
        for cached in cache.tuned.values():
            tensors = list(calls.tensors_of((cached.example.args, cached.example.kwargs)))
            sizes = self.dims.sizes_of(tensors)
            if sizes is not None and sizes in self.times_ms:
                programs.append(SizedPlan(sizes, self.times_ms[sizes], cached.program.plan))
        return PlansForSizes(self.dims.ranges, self.not_split, tuple(programs))

    def why_no_program(self, sizes: Sizes) -> str:
        """Why the stock module computes a call within the ranges, and what to do."""
        shown = ", ".join(f"{one.dim}: {size}" for one, size in zip(self.dims.ranges, sizes, strict=True))
        split = ""
        if self.dims.batch is not None and self.not_split:
            split = f", and batches are not split ({self.not_split})"
        todo = f"call .add_size({{{shown}}}) or .improve() to make one"
        return f"no program for these sizes ({shown}){split}: the stock module runs; {todo}"


def _restored(
    dims: DynamicDims,
    example: calls.CallExample,
    not_split: str,
    memory: SharedMemory,
    times_ms: dict[Sizes, float],
) -> SizePrograms:
    made = SizePrograms(dims, example, not_split, memory)
    made.times_ms.update(times_ms)
    return made
