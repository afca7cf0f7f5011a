"""Lifetimes of values: after which launch each slot's memory may go back, and what a run holds at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.problem import TensorSpec
from convoy.schedule import finished_before

if TYPE_CHECKING:
    from convoy.program.bind import BoundPlan, BoundStep
    from convoy.program.concat_in_place import ChannelSlice


def with_frees(steps: list[BoundStep], outputs: list[int]) -> None:
    """Note after which step each slot's memory may go back: at once on one stream.

    With several, memory goes back to the stream of the step that made it. That is safe right before a later step of that
    stream that starts only when every reader has finished; a value without such a step stays to the end. One that is made in
    pieces, by steps of several streams, is stream 0's, and noted beside it is after which step it must be there.
    """
    order = [(bound.step.stream, bound.step.waits) for bound in steps]
    streams = 1 + max((stream for stream, _ in order), default=0)
    known = finished_before(order, streams)
    used = slot_users(steps)
    owner = {slot: bound.step.stream for bound in steps for slot in bound.results}
    frees: list[list[int]] = [[] for _ in steps]
    opens: list[list[ChannelSlice]] = [[] for _ in steps]
    wholes = {place.slot: place for bound in steps for place in bound.places if place is not None}
    if streams > 1:
        for slot, place in wholes.items():
            owner[slot] = 0
            opens[_opening(order, known, used[slot])].append(place)
    for slot in sorted(used.keys() - set(outputs)):
        at = _first_safe(order, known, used[slot], owner.get(slot, 0))
        if at is not None:
            frees[at - 1].append(slot)
    for bound, slots, places in zip(steps, frees, opens, strict=True):
        bound.frees, bound.opens = tuple(slots), tuple(places)


def slot_users(steps: Sequence[BoundStep]) -> dict[int, list[int]]:
    """For each slot, the launches that read or write it, in order."""
    found: dict[int, list[int]] = {}
    for at, bound in enumerate(steps):
        for slot in dict.fromkeys(bound.touched()):
            found.setdefault(slot, []).append(at)
    return found


@dataclass(frozen=True, slots=True)
class StreamPool:
    """A stream's memory at its fullest.

    Attributes:
        size_bytes: what its values take then.
        makers: the steps that made them, by position.
    """

    size_bytes: int
    makers: tuple[int, ...]


def stream_pools(bound: BoundPlan) -> dict[int, StreamPool]:
    """Each stream's memory at its fullest in one run, workspaces left out; inputs are the caller's and not counted."""
    owner: dict[int, tuple[int, int, int]] = {}
    held: dict[int, int] = {}
    found: dict[int, StreamPool] = {}

    def add(slot: int, stream: int, spec: TensorSpec, maker: int) -> None:
        owner[slot] = stream, spec.size_bytes, maker
        held[stream] = held.get(stream, 0) + spec.size_bytes

    def look(stream: int) -> None:
        if held.get(stream, 0) > (found[stream].size_bytes if stream in found else -1):
            made = sorted({maker for where, _, maker in owner.values() if where == stream})
            found[stream] = StreamPool(held.get(stream, 0), tuple(made))

    for at, step in enumerate(bound.steps):
        for place in step.opens:
            add(place.slot, 0, place.spec, at)
            look(0)
        places = step.places or (None,) * len(step.results)
        for slot, spec, place in zip(step.results, step.specs, places, strict=True):
            slot, spec = (slot, spec) if place is None else (place.slot, place.spec)
            if slot not in owner:
                add(slot, step.step.stream, spec, at)
        look(step.step.stream)
        for slot in step.frees:
            if slot in owner:
                stream, size, _ = owner.pop(slot)
                held[stream] -= size
    return found


def peak_bytes(bound: BoundPlan) -> int:
    """Memory that the values of one run hold at most, and the workspaces: each stream has a pool of its own.

    What a stream gives back serves that stream alone, so the pools' peaks add up.
    """
    scratch: dict[int, int] = {}
    for step in bound.steps:
        stream = step.step.stream
        scratch[stream] = max(scratch.get(stream, 0), step.executable.workspace_bytes)
    return sum(pool.size_bytes for pool in stream_pools(bound).values()) + sum(scratch.values())


def _opening(order: Sequence[tuple[int, Sequence[int]]], known: Sequence[Sequence[int]], users: Sequence[int]) -> int:
    """The last step before which a value of stream 0 may be allocated that steps of other streams write to.

    What it gets may be memory that went back before some step of stream 0 that has begun by then. So every user must start
    after the last of those.
    """
    for at in range(users[0], 0, -1):
        last = max((before for before in range(at) if order[before][0] == 0), default=-1)
        if all(known[user][0] >= last for user in users):
            return at
    return 0


def _first_safe(
    order: Sequence[tuple[int, Sequence[int]]], known: Sequence[Sequence[int]], users: Sequence[int], owner: int
) -> int | None:
    """The first step of a stream before which all users have finished; the end where there is but one stream."""
    for at in range(users[-1] + 1, len(order)):
        if order[at][0] == owner and all(user <= known[at][order[user][0]] for user in users):
            return at
    return len(order) if len(known[0]) == 1 else None
