"""Lifetimes of values, and their places in one arena: values with disjoint lifetimes share memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

ALIGNMENT: Final = 256
"""Bytes: the alignment of CUDA's allocator, and more than any vector load needs."""


class LaunchValues(Protocol):
    """The values of a step, for lifetimes."""

    @property
    def args(self) -> tuple[str, ...]:
        """Names of the values read."""
        ...

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the values made."""
        ...


@dataclass(frozen=True, slots=True)
class Arena:
    """Byte offsets of values in one buffer of `size_bytes`."""

    offsets: dict[str, int]
    size_bytes: int


def lifetimes(steps: Sequence[LaunchValues], keep: Collection[str] = ()) -> dict[str, tuple[int, int]]:
    """For each value made, the first and the last step during which it must exist.

    Args:
        steps: launches in order; values are named `NAME` or `NAME@LAYOUT`.
        keep: values (by `NAME`) that live to the end.
    """
    found: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(steps):
        for name in step.results:
            found[name] = (index, len(steps) if name.partition("@")[0] in keep else index)
        for name in step.args:
            if name in found:
                found[name] = (found[name][0], max(found[name][1], index))
    return found


def plan_memory(steps: Sequence[LaunchValues], sizes: Mapping[str, int], *, keep: Collection[str] = ()) -> Arena:
    """Place every value, largest first, each in the smallest gap that is free during its whole life.

    Args:
        steps: launches in order.
        sizes: bytes of each value, by `NAME`.
        keep: values that live to the end.
    """
    lives = lifetimes(steps, keep)
    offsets: dict[str, int] = {}
    placed: list[tuple[int, int, str]] = []
    for name in sorted(lives, key=lambda n: (-sizes[n.partition("@")[0]], lives[n], n)):
        size = _aligned(sizes[name.partition("@")[0]])
        begin, end = lives[name]
        busy = sorted((o, o + s) for o, s, other in placed if lives[other][0] <= end and begin <= lives[other][1])
        offsets[name] = _smallest_gap(busy, size)
        placed.append((offsets[name], size, name))
    return Arena(offsets, max((offset + size for offset, size, _ in placed), default=0))


def check(arena: Arena, lives: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]) -> str:
    """What is wrong with an arena, as a sentence; empty if nothing is."""
    names = sorted(arena.offsets, key=lambda name: arena.offsets[name])
    for index, name in enumerate(names):
        start, stop = arena.offsets[name], arena.offsets[name] + sizes[name.partition("@")[0]]
        if start % ALIGNMENT or start < 0 or stop > arena.size_bytes:
            return f"{name} lies at {start} to {stop}, outside the arena of {arena.size_bytes} bytes or unaligned"
        for other in names[index + 1 :]:
            together = lives[name][0] <= lives[other][1] and lives[other][0] <= lives[name][1]
            if together and arena.offsets[other] < stop:
                return f"{name} and {other} live at the same time and overlap"
    return ""


def _aligned(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def _smallest_gap(busy: Sequence[tuple[int, int]], size: int) -> int:
    best, best_size, cursor = -1, -1, 0
    for start, stop in busy:
        gap = start - cursor
        if gap >= size and (best < 0 or gap < best_size):
            best, best_size = cursor, gap
        cursor = max(cursor, stop)
    return best if best >= 0 else cursor
