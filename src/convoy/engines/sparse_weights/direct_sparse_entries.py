"""A pruned weight's non-zeros as `cuda/direct.cu` reads them: by block and filter, in fours. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convoy.engines.sparse_weights.direct_sparse_tile import ENTRY_BYTES, FOUR, DirectGeometry

_UNIT = 16 // 4
"""int32s of what lists are counted in."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The lists of all blocks, one after another; blocks that differ only in their tile share a list.

    Attributes:
        words: int32; a list holds its filters' first groups of four, the end, and entries of two words: bytes from the start
            of a block's input, and the bits of a value in fp32, zero here. Groups of four are padded with zeros at an offset
            that holds zero.
        begins: int32, the start of each list and the end of the last, in units of sixteen bytes.
        values: int64, indices of the words that hold values.
        places: int64, each value's index in the weight, flattened.
        most: entries of the longest list.
    """

    words: NDArray[np.int32]
    begins: NDArray[np.int32]
    values: NDArray[np.int64]
    places: NDArray[np.int64]
    most: int


def entries_of(mask: NDArray[np.bool_], geometry: DirectGeometry) -> Entries:
    """The entries of a mask's non-zeros.

    Args:
        mask: booleans [k, c / groups, r, s].
        geometry: problem and tile configuration.
    """
    problem, config = geometry.problem, geometry.config
    k, c, r, s = np.nonzero(mask)
    group, within = np.divmod(k, geometry.group_filters)
    block, filter_ = np.divmod(within, config.filters)
    slice_, cell = np.divmod(c, geometry.channels)
    phases, offsets = _taps(geometry)
    offset = (cell * geometry.phases + phases[r, s]) * geometry.span + offsets[r, s]
    lists = problem.groups * geometry.blocks * config.slices
    run = ((group * geometry.blocks + block) * config.slices + slice_) * config.filters + filter_
    order = np.lexsort((offset, run))
    run, offset = run[order], offset[order]

    counts = np.bincount(run, minlength=lists * config.filters).reshape(lists, -1)
    fours = -(-counts // FOUR)
    ends = np.cumsum(fours, axis=1)
    sizes = geometry.head // _UNIT + ends[:, -1] * (FOUR * ENTRY_BYTES // 16)
    begins = np.concatenate([[0], np.cumsum(sizes)])
    words = np.zeros(int(begins[-1]) * _UNIT, np.int32)
    heads = begins[:-1, None] * _UNIT + np.arange(geometry.head)
    words[heads[:, 1 : ends.shape[1] + 1]] = ends
    bodies = begins[:-1] * _UNIT + geometry.head
    is_body = np.ones(len(words), bool)
    is_body[heads] = False
    words[np.flatnonzero(is_body)[::2]] = geometry.zeros_bytes

    # An entry's word: its list's body, the fours before its run, its number in the run.
    number = np.arange(len(run)) - (np.cumsum(counts) - counts.ravel())[run]
    first = (bodies[:, None] + (ends - fours) * (FOUR * ENTRY_BYTES // 4)).ravel()
    places = first[run] + number * (ENTRY_BYTES // 4)
    words[places] = 4 * offset
    flat = np.ravel_multi_index((k, c, r, s), mask.shape)[order].astype(np.int64)
    most = int(ends[:, -1].max(initial=0)) * FOUR
    return Entries(words, begins.astype(np.int32), (places + 1).astype(np.int64), flat, most)


def _taps(geometry: DirectGeometry) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each filter tap's phase and offset in its plane."""
    problem, pitch = geometry.problem, geometry.layout.pitch
    rows, columns = np.arange(problem.r) * problem.dilation_h, np.arange(problem.s) * problem.dilation_w
    phase_h = np.searchsorted(geometry.rows, rows % problem.stride_h)
    phase_w = np.searchsorted(geometry.columns, columns % problem.stride_w)
    phases = phase_h[:, None] * len(geometry.columns) + phase_w
    offsets = rows[:, None] // problem.stride_h * pitch + columns // problem.stride_w
    return phases, offsets
