"""The cheapest way to compute a batch by programs for given batch sizes: split, padded, or both. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PART_MS: Final = 0.002
"""Milliseconds that each further part costs beside its program: its slice of the inputs and of the outputs."""


@dataclass(frozen=True, slots=True)
class Cover:
    """Programs that together compute a batch.

    Attributes:
        batches: their batch sizes, the largest first. They add up to the batch or to more; then the last one is padded.
        cost_ms: the sum of their times, with `PART_MS` for each part but the first.
    """

    batches: tuple[int, ...]
    cost_ms: float


def cheapest_cover(images: int, times_ms: Mapping[int, float]) -> Cover:
    """The cover of a batch with the least sum of times, found exactly by dynamic programming; of equal ones that of fewer parts.

    Args:
        images: images of the batch, at least 1.
        times_ms: milliseconds of each program, by its batch size; at least one.
    """
    costs, lengths, choices = [0.0], [0], [0]
    for count in range(1, images + 1):
        found: tuple[float, int, int] | None = None
        for batch, time in times_ms.items():
            rest = max(0, count - batch)
            option = (time + costs[rest] + (PART_MS if rest else 0.0), lengths[rest] + 1, batch)
            found = option if found is None or option < found else found
        assert found is not None
        costs.append(found[0])
        lengths.append(found[1])
        choices.append(found[2])
    batches: list[int] = []
    left = images
    while left > 0:
        batches.append(choices[left])
        left -= choices[left]
    return Cover(tuple(sorted(batches, reverse=True)), costs[images])


def buckets(least: int, most: int, example: int) -> tuple[int, ...]:
    """Batch sizes that programs are made for: the powers of two of a range, its ends, and the example's; the largest first."""
    powers = {1 << power for power in range(most.bit_length())}
    return tuple(sorted({size for size in powers if least <= size <= most} | {least, most, example}, reverse=True))
