"""Lifetimes of values: after which launch each slot's memory may go back, and what a run holds at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from convoy.schedule import finished_before

if TYPE_CHECKING:
    from convoy.program.bind import Bound, BoundStep


def mark_frees(steps: list[BoundStep], outputs: list[int]) -> None:
    """Note after which step each slot's memory may go back: at once on one stream.

    With several, memory goes back to the stream of the step that made it. That is safe right before a later step of that
    stream that starts only when every reader has finished; a value without such a step stays to the end. So does one that is
    made in pieces: steps of several streams write to it, so it is allocated before all of them.
    """
    order = [(bound.step.stream, bound.step.waits) for bound in steps]
    known = finished_before(order, 1 + max((stream for stream, _ in order), default=0))
    used = users(steps)
    owner = {slot: bound.step.stream for bound in steps for slot in bound.results}
    frees: list[list[int]] = [[] for _ in steps]
    wholes = {place.slot for bound in steps for place in bound.places if place is not None}
    kept = set(outputs) if len(known[0]) == 1 else {*outputs, *wholes}
    for slot in sorted(used.keys() - kept):
        at = _first_safe(order, known, used[slot], owner.get(slot, 0))
        if at is not None:
            frees[at - 1].append(slot)
    for bound, slots in zip(steps, frees, strict=True):
        bound.frees = tuple(slots)


def users(steps: Sequence[BoundStep]) -> dict[int, list[int]]:
    """For each slot, the launches that read or write it, in order."""
    found: dict[int, list[int]] = {}
    for at, bound in enumerate(steps):
        for slot in dict.fromkeys(bound.touched()):
            found.setdefault(slot, []).append(at)
    return found


def peak_bytes(bound: Bound) -> int:
    """Memory that the values of one run hold at most, and the workspaces: each stream has a pool of its own.

    What a stream gives back serves that stream alone, so the pools' peaks add up. Inputs are the caller's and not counted.
    """
    owner: dict[int, tuple[int, int]] = {}
    held: dict[int, int] = {}
    peak: dict[int, int] = {}
    scratch: dict[int, int] = {}
    for step in bound.steps:
        stream = step.step.stream
        scratch[stream] = max(scratch.get(stream, 0), step.executable.workspace_bytes)
        places = step.places or (None,) * len(step.results)
        for slot, spec, place in zip(step.results, step.specs, places, strict=True):
            slot, spec = (slot, spec) if place is None else (place.slot, place.spec)
            if slot not in owner:
                owner[slot] = stream, spec.size_bytes
                held[stream] = held.get(stream, 0) + spec.size_bytes
        peak[stream] = max(peak.get(stream, 0), held.get(stream, 0))
        for slot in step.frees:
            if slot in owner:
                stream, size = owner.pop(slot)
                held[stream] -= size
    return sum(peak.values()) + sum(scratch.values())


def _first_safe(
    order: Sequence[tuple[int, Sequence[int]]], known: Sequence[Sequence[int]], users: Sequence[int], owner: int
) -> int | None:
    """The first step of a stream before which all users have finished; the end where there is but one stream."""
    for at in range(users[-1] + 1, len(order)):
        if order[at][0] == owner and all(user <= known[at][order[user][0]] for user in users):
            return at
    return len(order) if len(known[0]) == 1 else None
