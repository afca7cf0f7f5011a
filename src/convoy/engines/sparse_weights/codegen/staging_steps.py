"""The segments of a kernel as steps: the planes and packed values that a block copies to shared memory at once. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from convoy.engines.sparse_weights.codegen.kernel_ir import MaskKernel, Segment

WORD: Final = 4
"""Values of one load from shared memory."""


@dataclass(frozen=True, slots=True)
class StagingStep:
    """Segments of a group that share a stage, at most one of each split.

    Attributes:
        segments: in the order of their splits.
        first: the first of their values.
        after: the value after the last.
        packed: index of the first among the packed values: a multiple of `WORD`.
    """

    segments: tuple[Segment, ...]
    first: int
    after: int
    packed: int

    @property
    def stage(self) -> tuple[int, ...]:
        """Planes to copy."""
        return self.segments[0].stage

    @property
    def floats(self) -> int:
        """Floats of shared memory that the values take."""
        return -(-(self.after - self.first) // WORD) * WORD


def steps(kernel: MaskKernel) -> list[list[StagingStep]]:
    """By group, its segments as steps; segments without code are left out."""
    found: list[list[StagingStep]] = []
    first = packed = 0
    for group in kernel.groups:
        found.append([])
        for segments in _together([segment for segment in group.segments if segment.loads]):
            after = first + sum(segment.uses for segment in segments)
            found[-1].append(StagingStep(tuple(segments), first, after, packed))
            packed += found[-1][-1].floats
            first = after
    return found


def _together(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    step: list[Segment] = []
    for segment in segments:
        if step and (segment.split <= step[-1].split or segment.stage != step[-1].stage):
            yield step
            step = []
        step.append(segment)
    if step:
        yield step


def buffers_of(kernel: MaskKernel, shared_bytes: int) -> tuple[int, int]:
    """How many steps are in shared memory at once, and floats of one: all of a group's, or as many as fit, two at least."""
    found = steps(kernel)
    floats = max((kernel.span * len(step.stage) + step.floats for group in found for step in group), default=0)
    most = max(map(len, found), default=0)
    return min(most, max(2, shared_bytes // (4 * max(floats, 1)))), floats
