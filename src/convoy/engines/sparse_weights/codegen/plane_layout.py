"""The layout of the padded input of a block of outputs, chosen so that borders need no tests. No torch here.

A block is some whole images or some rows of one image. Its input is copied to planes, one for each input channel that some
filter reads and each phase of the stride: plane (a, b) of a channel has the padded image's rows a, a + stride_h, ... and
columns b, b + stride_w, ...; then every problem has stride 1. Output pixel (i, p, q) of a block is at position (i ·
image_rows + p) · pitch + q, and filter tap (r, s) of channel c reads, for every output of the block, at

    offset(c, r, s) + position

so a run of positions is a run of floats, whatever rows and images it crosses. Positions between the rows (pitch - q of them)
compute nothing that is kept. Neighbouring rows, and images, share their zeros: the zeros right of one row are those left of
the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from convoy.problem import ConvProblem

LINE_FLOATS: Final = 16
"""Floats of a cache line."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of the stride.

    Attributes:
        row: the padded image's first row.
        column: its first column.
        first: first column of a plane that holds the image, not padding.
        after: the column after the last such column.
    """

    row: int
    column: int
    first: int
    after: int


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Where everything lies.

    Attributes:
        problem: the convolution.
        channels: input channels that some filter reads.
        phases: phases of the stride that some filter reads.
        images: images of a block.
        rows: output rows of a block.
        reach_h: rows below an output's own that a filter reads, in a plane.
        reach_w: the same for columns.
        pitch: positions from row to row.
        image_rows: rows from image to image.
        tile: positions computed at once.
        slack: floats that a tile's part of a plane has besides.
    """

    problem: ConvProblem
    channels: tuple[int, ...]
    phases: tuple[Phase, ...]
    images: int
    rows: int
    reach_h: int
    reach_w: int
    pitch: int
    image_rows: int
    tile: int
    slack: int = 0

    @property
    def positions(self) -> int:
        """Positions of a whole block, up to a whole tile."""
        last = ((self.images - 1) * self.image_rows + self.rows - 1) * self.pitch + self.problem.q
        return -(-last // self.tile) * self.tile

    @property
    def span(self) -> int:
        """Floats of a plane that a tile reads, rounded up to 16 bytes of halves, the unit of copies to shared memory."""
        return -(-(self.tile + self.reach_h * self.pitch + self.reach_w + self.slack) // 8) * 8

    @property
    def plane(self) -> int:
        """Floats of a plane: an odd number of cache lines, so that the planes' same places are not in one set of a cache."""
        written = ((self.images - 1) * self.image_rows + self.rows + self.reach_h) * self.pitch
        return odd_lines(max(self.positions - self.tile + self.span, written))

    @property
    def planes(self) -> int:
        """Planes of a block."""
        return len(self.channels) * len(self.phases)

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks: groups of images times groups of rows."""
        return -(-self.problem.n // self.images), -(-self.problem.p // self.rows)

    def tap(self, r: int, s: int) -> tuple[int, int]:
        """Phase and offset in its plane of a filter tap."""
        problem = self.problem
        row, column = r * problem.dilation_h, s * problem.dilation_w
        phase = (row % problem.stride_h, column % problem.stride_w)
        index = next(i for i, found in enumerate(self.phases) if (found.row, found.column) == phase)
        return index, row // problem.stride_h * self.pitch + column // problem.stride_w


def odd_lines(floats: int) -> int:
    """So many floats, up to an odd number of cache lines."""
    lines = -(-floats // LINE_FLOATS)
    return (lines | 1) * LINE_FLOATS


def lay_out(
    problem: ConvProblem,
    taps: Iterable[tuple[int, int]],
    channels: tuple[int, ...],
    *,
    tile: int,
    images: int,
    rows: int,
    align: int = 1,
    slack: int = 0,
) -> PlaneLayout:
    """The layout for a problem.

    Args:
        problem: a forward convolution.
        taps: (r, s) of every filter tap that some filter uses.
        channels: input channels that some filter reads.
        tile: positions computed at once.
        images: images of a block, at most; more than one only if a block has whole images.
        rows: output rows of a block, at most.
        align: the pitch is a multiple: a thread's neighbouring pixels are then in one row, if q is a multiple too.
        slack: extra floats of a tile's part of a plane.
    """
    used = sorted(set(taps))
    starts = sorted({_phase(problem, r, s) for r, s in used})
    reach_h = max((r * problem.dilation_h // problem.stride_h for r, _ in used), default=0)
    reach_w = max((s * problem.dilation_w // problem.stride_w for _, s in used), default=0)
    rows = min(rows, problem.p)
    images = min(images, problem.n) if rows == problem.p else 1
    columns = problem.q + reach_w
    shared_w = _shared([b for _, b in starts], columns, problem.stride_w, problem.pad_w, problem.w, reach_w)
    tall = rows + reach_h
    shared_h = _shared([a for a, _ in starts], tall, problem.stride_h, problem.pad_h, problem.h, reach_h)
    pitch = -(-(columns - shared_w) // align) * align
    phases = tuple(Phase(a, b, *_inside(b, pitch, problem.stride_w, problem.pad_w, problem.w)) for a, b in starts)
    image_rows = tall - shared_h if images > 1 else tall
    return PlaneLayout(problem, channels, phases, images, rows, reach_h, reach_w, pitch, image_rows, tile, slack)


def _phase(problem: ConvProblem, r: int, s: int) -> tuple[int, int]:
    return r * problem.dilation_h % problem.stride_h, s * problem.dilation_w % problem.stride_w


def _inside(start: int, count: int, stride: int, pad: int, size: int) -> tuple[int, int]:
    """First index of `count` inside the image, and the index after the last: index t is at start + t · stride - pad."""
    first = min(max(-((start - pad) // stride), 0), count)
    after = min(max((size - 1 + pad - start) // stride + 1, 0), count)
    return first, max(first, after)


def _shared(starts: list[int], count: int, stride: int, pad: int, size: int, most: int) -> int:
    """Number of indices at both ends that are zero in every phase: that many may overlap."""
    shared = most
    for start in starts:
        first, after = _inside(start, count, stride, pad, size)
        shared = min(shared, first, count - after)
    return shared
