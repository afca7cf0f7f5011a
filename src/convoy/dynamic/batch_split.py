"""The cheapest way to compute a batch by programs for given batch sizes: split, padded, or both. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PART_MS: Final = 0.002
"""Milliseconds that each further part costs beside its program: its slice of the inputs and of the outputs."""


ALLOWED: Final = 1.1
"""Time of a batch over that of a program of its own from which a further program is worth its tuning."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Programs that together compute a batch.

    Attributes:
        batches: their batch sizes, the largest first. They add up to the batch or to more; then the last one is padded.
        cost_ms: the sum of their times, with `PART_MS` for each part but the first.
    """

    batches: tuple[int, ...]
    cost_ms: float


def cheapest_split(images: int, times_ms: Mapping[int, float]) -> BatchSplit:
    """The split of a batch with the least sum of times, found exactly by dynamic programming; of equal ones that of fewer parts.

    Args:
        images: images of the batch, at least 1.
        times_ms: milliseconds of each program, by its batch size; at least one.
    """
    costs, choices = _cheapest(images, times_ms)
    batches: list[int] = []
    left = images
    while left > 0:
        batches.append(choices[left])
        left -= choices[left]
    return BatchSplit(tuple(sorted(batches, reverse=True)), costs[images])


def _cheapest(images: int, times_ms: Mapping[int, float]) -> tuple[list[float], list[int]]:
    """For each batch up to `images`: the least sum of times, and one program of the split that has it."""
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
    return costs, choices


def next_bucket(times_ms: Mapping[int, float]) -> int | None:
    """The batch size for which a further program helps most; None if every batch is within `ALLOWED` of a program of its own.

    The time of a program that does not exist is taken to lie on the line between its neighbours'. The batch that is worst off
    gets one; of those that it may be padded to at `ALLOWED`, the largest, so that smaller batches are padded to it too.

    Args:
        times_ms: milliseconds of each program, by its batch size.
    """
    known = sorted(times_ms)
    costs, _ = _cheapest(known[-1], times_ms)
    own: dict[int, float] = {}
    for low, high in pairwise(known):
        slope = (times_ms[high] - times_ms[low]) / (high - low)
        own.update((size, times_ms[low] + slope * (size - low)) for size in range(low + 1, high))
    if not own:
        return None
    worst = max(own, key=lambda size: costs[size] / max(own[size], PART_MS))
    if costs[worst] <= ALLOWED * own[worst]:
        return None
    return max(size for size, time in own.items() if size == worst or (size > worst and time <= ALLOWED * own[worst]))


def buckets(least: int, most: int, example: int) -> tuple[int, ...]:
    """Batch sizes that programs are made for: the powers of two of a range, its ends, and the example's; the largest first."""
    powers = {1 << power for power in range(most.bit_length())}
    return tuple(sorted({size for size in powers if least <= size <= most} | {least, most, example}, reverse=True))
