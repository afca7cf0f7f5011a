"""How a thread block of generated CUDA code copies a plane of the input to shared memory. No torch here."""

from __future__ import annotations

from typing import Final

from convoy.engines.sparse_weights.codegen.plane_layout import PlaneLayout

FOUR: Final = 4
"""Floats of the widest copy."""

MOST_ROUNDS: Final = 8
"""Positions of a tile that a thread copies in each plane, at most: it remembers where they are, a register each."""


def fours(layout: PlaneLayout, tile: int) -> int | None:
    """Floats by which a tile's part of a plane is moved, so that four can be copied at once; None where they cannot.

    Four neighbours are then of one row of the image, or all outside of it.
    """
    problem = layout.problem
    if problem.x_dtype != "fp32" or problem.stride_w != 1 or len(layout.phases) != 1:
        return None
    if problem.w % FOUR or layout.pitch % FOUR or tile % FOUR or layout.slack < FOUR - 1:
        return None
    padding = problem.pad_w - layout.phases[0].column
    shift = -padding % FOUR
    # Where four cross into the next row, what they have of this one must be behind its image.
    return shift if not shift or layout.pitch >= problem.w + padding + shift else None


def along(span: int, planes: int, threads: int) -> int:
    """Threads that go along a plane when it is copied; others copy other planes.

    As many as can be (a thread then has few positions to remember) without an eighth more copies than the best way takes.
    """
    ways = [count for count in range(1, threads + 1) if threads % count == 0 and (count % 32 == 0 or count == threads)]
    copies = {count: -(-span // count) * -(-planes // (threads // count)) for count in ways}
    few = [count for count in ways if -(-span // count) <= MOST_ROUNDS] or ways
    least = min(copies[count] for count in few)
    return max(count for count in few if copies[count] <= 1.125 * least)
