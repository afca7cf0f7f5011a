"""Lifetimes of values: after which launch each slot's memory can be freed, and how much memory a run holds at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.problem import TensorSpec
from convoy.program.bound_plan import BoundPlan, BoundStep, ChannelSlice
from convoy.schedule import finished_before


def with_frees(steps: Sequence[BoundStep], outputs: Sequence[int]) -> tuple[BoundStep, ...]:
    """The steps with the slots that are freed after each: on one stream right after the last use.

    With several streams, freed memory returns to the pool of the stream that allocated it. A slot is freed right before a later
    step of that stream that starts only when every reader has finished; a value without such a step stays until the end. A value
    that steps of several streams write in slices belongs to stream 0; `opens` says before which step it is allocated.
    """
    order = [(bound.step.stream, bound.step.waits) for bound in steps]
    streams = 1 + max((stream for stream, _ in order), default=0)
    known = finished_before(order, streams)
    used = slot_users(steps)
    owner = {slot: bound.step.stream for bound in steps for slot in bound.results}
    frees: list[list[int]] = [[] for _ in steps]
    opens: list[list[ChannelSlice]] = [[] for _ in steps]
    wholes = {part.slot: part for bound in steps for part in bound.slices if part is not None}
    if streams > 1:
        for slot, part in wholes.items():
            owner[slot] = 0
            opens[_opening(order, known, used[slot])].append(part)
    for slot in sorted(used.keys() - set(outputs)):
        at = _first_safe(order, known, used[slot], owner.get(slot, 0))
        if at is not None:
            frees[at - 1].append(slot)
    return tuple(
        replace(bound, frees=tuple(slots), opens=tuple(parts))
        for bound, slots, parts in zip(steps, frees, opens, strict=True)
    )


def slot_users(steps: Sequence[BoundStep]) -> dict[int, list[int]]:
    """For each slot, the launches that read or write it, in order."""
    found: dict[int, list[int]] = {}
    for at, bound in enumerate(steps):
        for slot in dict.fromkeys(bound.touched()):
            found.setdefault(slot, []).append(at)
    return found


@dataclass(frozen=True, slots=True)
class StreamPool:
    """A stream's memory at the moment when it holds most.

    Attributes:
        size_bytes: bytes of the values that it holds.
        makers: indices of the steps that made them.
    """

    size_bytes: int
    makers: tuple[int, ...]


def stream_pools(bound: BoundPlan) -> dict[int, StreamPool]:
    """Each stream's memory when it holds most in a run, without workspaces. Inputs belong to the caller and are not counted."""
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
        for part in step.opens:
            add(part.slot, 0, part.spec, at)
            look(0)
        slices = step.slices or (None,) * len(step.results)
        for slot, spec, part in zip(step.results, step.specs, slices, strict=True):
            slot, spec = (slot, spec) if part is None else (part.slot, part.spec)
            if slot not in owner:
                add(slot, step.step.stream, spec, at)
        look(step.step.stream)
        for slot in step.frees:
            if slot in owner:
                stream, size, _ = owner.pop(slot)
                held[stream] -= size
    return found


def peak_bytes(bound: BoundPlan) -> int:
    """Bytes that the values of one run hold at most, plus the workspaces.

    Each stream has a memory pool of its own, and memory freed on a stream serves that stream only, so the pools' peaks add up.
    """
    scratch: dict[int, int] = {}
    for step in bound.steps:
        stream = step.step.stream
        scratch[stream] = max(scratch.get(stream, 0), step.executable.workspace_bytes)
    return sum(pool.size_bytes for pool in stream_pools(bound).values()) + sum(scratch.values())


def _opening(order: Sequence[tuple[int, Sequence[int]]], known: Sequence[Sequence[int]], users: Sequence[int]) -> int:
    """The last step before which stream 0 may allocate a value that steps of other streams write.

    The allocator may give it memory that was freed before a step of stream 0 that has already begun. So every user must start
    after the last such step.
    """
    for at in range(users[0], 0, -1):
        last = max((before for before in range(at) if order[before][0] == 0), default=-1)
        if all(known[user][0] >= last for user in users):
            return at
    return 0


def _first_safe(
    order: Sequence[tuple[int, Sequence[int]]], known: Sequence[Sequence[int]], users: Sequence[int], owner: int
) -> int | None:
    """The first step of the owning stream before which all users have finished; with one stream possibly the end of the run."""
    for at in range(users[-1] + 1, len(order)):
        if order[at][0] == owner and all(user <= known[at][order[user][0]] for user in users):
            return at
    return len(order) if len(known[0]) == 1 else None
