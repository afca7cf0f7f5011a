"""The walk through a mask: from a template and the positions of the non-zeros to a kernel. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from convoy.engines.sparse_weights.codegen.kernel_ir import Group, Load, MaskKernel, Segment
from convoy.engines.sparse_weights.codegen.plane_layout import PlaneLayout
from convoy.problem import WeightMask

LOAD_BYTES: Final = 10
USE_BYTES: Final = 8
"""Code bytes of a load and of a multiply-add with a value from memory: AVX-512, a 32-bit offset in each load."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How code is partitioned.

    Attributes:
        filters: filters whose sums are in registers together, at most.
        channels: input channels of a segment, at most: their part of a tile stays in the L1 cache.
        code_bytes: a segment's code, approximately, at most: it stays in the instruction cache.
        staged: whether a segment's planes are copied to shared memory first.
        splits: splits among which each segment's code is divided, at most.
    """

    filters: int
    channels: int
    code_bytes: int
    staged: bool = False
    splits: int = 1


def positions(mask: WeightMask) -> NDArray[np.bool_]:
    """A mask as booleans [k, c / groups, r, s]."""
    bits = np.unpackbits(np.frombuffer(mask.bits, np.uint8), count=mask.positions)
    return bits.astype(bool).reshape(mask.shape)


def used_taps(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(r, s) of the taps that some filter uses."""
    return [(int(r), int(s)) for r, s in np.argwhere(mask.any(axis=(0, 1)))]


def used_channels(mask: NDArray[np.bool_], groups: int) -> tuple[int, ...]:
    """Input channels that some filter reads."""
    by_group = mask.reshape(groups, -1, *mask.shape[1:]).any(axis=(1, 3, 4))
    return tuple(int(c) for c in np.flatnonzero(by_group))


def walk(mask: NDArray[np.bool_], layout: PlaneLayout, lanes: int, cut: Cut) -> tuple[MaskKernel, NDArray[np.int64]]:
    """Write the kernel of a mask.

    Args:
        mask: booleans [k, c / groups, r, s].
        layout: the template.
        lanes: pixels of a vector; `layout.tile` is a multiple.
        cut: how to cut the code.

    Returns:
        The kernel, and for each of its values the place in the weight, flattened: how new weights become values.
    """
    order: list[NDArray[np.int64]] = []
    groups: list[Group] = []
    done = 0
    for filters in partition(mask, cut.filters):
        entries = _entries(mask, layout, filters)
        segments: list[Segment] = []
        begun: set[int] = set()
        for whole, stage in _segments(entries, layout, cut):
            for split, loads in _deal(whole, layout.pitch, cut.splits):
                segments.append(_segment(loads, stage, layout, done, split, begins=split not in begun))
                begun.add(split)
                order += [entry[:, _PLACE] for entry in loads]
                done += sum(map(len, loads))
        groups.append(Group(tuple(filters), tuple(segments) or (Segment(True, ()),)))
    places = np.concatenate(order) if order else np.zeros(0, np.int64)
    kernel = MaskKernel(
        lanes=lanes,
        vectors=layout.tile // lanes,
        positions=layout.positions,
        plane=layout.plane,
        planes=layout.planes,
        span=layout.span,
        values=done,
        groups=tuple(groups),
    )
    return kernel, places


def partition(mask: NDArray[np.bool_], most: int) -> list[list[int]]:
    """Groups of at most `most` filters: as few as possible, of nearly equal size.

    Filters without non-zeros form groups of their own. Filters stay in order: neighbours often belong to one group of the
    convolution and share its channels.
    """
    reads = mask.any(axis=(1, 2, 3))
    found: list[list[int]] = []
    for wanted in (reads, ~reads):
        filters = [int(k) for k in np.flatnonzero(wanted)]
        count = -(-len(filters) // most)
        found += [filters[i * len(filters) // count : (i + 1) * len(filters) // count] for i in range(count)]
    return found


_PLANE, _OFFSET, _SUM, _PLACE = range(4)


def _entries(mask: NDArray[np.bool_], layout: PlaneLayout, filters: Sequence[int]) -> NDArray[np.int64]:
    """A row (plane, offset in the plane, sum, index in the weight) for each non-zero, in the order of the code.

    Ordered by channel, then by plane and offset, so that uses of one input are adjacent; then by filter.
    """
    found = np.argwhere(mask[list(filters)])
    total, channel, r, s = found.T
    outputs, per_group = mask.shape[0] // layout.problem.groups, mask.shape[1]
    k = np.asarray(filters, np.int64)[total]
    slot_of = np.full(layout.problem.c, -1, np.int64)
    slot_of[list(layout.channels)] = np.arange(len(layout.channels))
    slot = slot_of[k // outputs * per_group + channel]
    taps = np.zeros((*mask.shape[2:], 2), np.int64)
    for a, b in used_taps(mask):
        taps[a, b] = layout.tap(a, b)
    phase, offset = taps[r, s].T
    plane = slot * len(layout.phases) + phase
    place = np.ravel_multi_index((k, channel, r, s), mask.shape)
    entries = np.stack([plane, offset, total, place], axis=1)
    return entries[np.lexsort((total, offset, plane))]


def _segments(
    entries: NDArray[np.int64], layout: PlaneLayout, cut: Cut
) -> Iterator[tuple[list[NDArray[np.int64]], tuple[int, ...]]]:
    """Cut a group's entries between channels: for each segment the entries of each load, and the planes to be staged."""
    phases = len(layout.phases)
    loads = _runs(entries, entries[:, _PLANE] * layout.plane + entries[:, _OFFSET])
    segment: list[NDArray[np.int64]] = []
    channels: set[int] = set()
    size = 0
    for channel in _together(loads, phases):
        more = sum(LOAD_BYTES + USE_BYTES * len(load) for load in channel)
        if segment and (len(channels) == cut.channels or size + more > cut.code_bytes):
            yield segment, _stage(segment, cut)
            segment, channels, size = [], set[int](), 0
        segment += channel
        channels.add(int(channel[0][0, _PLANE]) // phases)
        size += more
    if segment:
        yield segment, _stage(segment, cut)


def _runs(entries: NDArray[np.int64], keys: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split entries where their key changes."""
    if not len(entries):
        return []
    return np.split(entries, np.flatnonzero(np.diff(keys)) + 1)


def _together(loads: Sequence[NDArray[np.int64]], phases: int) -> Iterator[list[NDArray[np.int64]]]:
    """Loads of one channel after another."""
    channels = [int(load[0, _PLANE]) // phases for load in loads]
    start = 0
    for at in range(1, len(loads) + 1):
        if at == len(loads) or channels[at] != channels[start]:
            yield list(loads[start:at])
            start = at


def _deal(loads: Sequence[NDArray[np.int64]], pitch: int, splits: int) -> Iterator[tuple[int, list[NDArray[np.int64]]]]:
    """Divide a segment's loads among splits, in order and by their uses; loads of one row of a filter stay together.

    Neighbouring taps of a row read nearly the same floats.
    """
    if splits == 1:
        yield 0, list(loads)
        return
    sizes = np.array([len(load) for load in loads])
    rows = np.array([(load[0, _PLANE], load[0, _OFFSET] // pitch) for load in loads])
    starts = np.flatnonzero(np.r_[True, (np.diff(rows, axis=0) != 0).any(axis=1)])
    before = np.cumsum(sizes) - sizes
    middle = before[starts] + np.add.reduceat(sizes, starts) / 2
    split_of_row = (middle * splits / sizes.sum()).astype(int)
    split_of = np.repeat(split_of_row, np.diff(np.r_[starts, len(loads)]))
    for split in range(splits):
        if len(dealt := np.flatnonzero(split_of == split)):
            yield split, [loads[at] for at in dealt]


def _stage(loads: Sequence[NDArray[np.int64]], cut: Cut) -> tuple[int, ...]:
    """Planes of a segment: those it reads, and those between if few are missing: a run of planes takes less code."""
    if not cut.staged:
        return ()
    planes = tuple(dict.fromkeys(int(load[0, _PLANE]) for load in loads))
    between = range(planes[0], planes[-1] + 1)
    return tuple(between) if len(between) <= 1.25 * len(planes) else planes


def _segment(
    loads: Sequence[NDArray[np.int64]],
    stage: tuple[int, ...],
    layout: PlaneLayout,
    done: int,
    split: int,
    *,
    begins: bool,
) -> Segment:
    """The IR of one segment, whose first value is `done`."""
    base = {plane: index * layout.span for index, plane in enumerate(stage)}
    pitch = layout.plane
    sizes = [len(load) for load in loads]
    whole = np.concatenate(loads)
    heads = whole[np.cumsum([0, *sizes[:-1]])]
    sums = whole[:, _SUM].tolist()
    code: list[Load] = []
    at = 0
    for plane, offset, size in zip(heads[:, _PLANE].tolist(), heads[:, _OFFSET].tolist(), sizes, strict=True):
        start = base[plane] if stage else plane * pitch
        uses = tuple(zip(sums[at : at + size], range(done + at, done + at + size), strict=True))
        code.append(Load(start + offset, uses))
        at += size
    return Segment(begins, tuple(code), stage, split)
