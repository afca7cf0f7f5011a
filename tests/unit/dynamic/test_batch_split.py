"""Splits and paddings of a batch: the least sum of times, against all that there are."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement

import pytest

from convoy.dynamic.batch_split import ALLOWED, PART_MS, buckets, cheapest_split, next_bucket


def cost(batches: tuple[int, ...], times: dict[int, float]) -> float:
    return sum(times[batch] for batch in batches) + PART_MS * (len(batches) - 1)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_cover_is_cheaper(seed: int) -> None:
    draws = random.Random(seed)
    times = {batch: draws.uniform(0.5, 1.5) * batch**0.7 for batch in (1, 2, 4, 8)}
    for images in range(1, 13):
        found = cheapest_split(images, times)
        every = [
            batches
            for length in range(1, images + 1)
            for batches in combinations_with_replacement(times, length)
            if sum(batches) >= images
        ]
        assert found.cost_ms == pytest.approx(min(cost(batches, times) for batches in every))
        assert found.cost_ms == pytest.approx(cost(found.batches, times))
        assert sum(found.batches) >= images > sum(found.batches) - found.batches[-1]


def test_a_batch_is_split_where_time_grows_with_images_and_padded_where_it_does_not() -> None:
    linear = {batch: float(batch) for batch in (1, 2, 4, 8, 16, 32, 64)}
    assert cheapest_split(37, linear).batches == (32, 4, 1)
    flat = {**linear, 32: 50.0, 64: 36.0}
    assert cheapest_split(37, flat).batches == (64,)
    assert cheapest_split(64, linear).batches == (64,)


def test_of_equal_times_the_fewest_programs_are_taken() -> None:
    assert cheapest_split(6, {1: 0.0, 2: 0.0, 8: 0.0}).batches == (8,)


def test_a_further_program_is_asked_for_where_it_helps_and_no_more() -> None:
    affine = {batch: 0.4 + 0.052 * batch for batch in (1, 2, 4, 8, 16, 32, 64)}
    before = worst_ratio(affine)
    while (size := next_bucket(affine)) is not None:
        assert size not in affine
        affine[size] = 0.4 + 0.052 * size
    assert before > 1.3
    assert worst_ratio(affine) <= ALLOWED
    assert len(affine) <= 24
    linear = {batch: float(batch) for batch in (1, 2, 4, 8, 16, 32, 64)}
    assert next_bucket(linear) is None
    assert next_bucket({4: 1.0}) is None
    assert next_bucket({4: 1.0, 5: 2.0}) is None


def worst_ratio(times: dict[int, float]) -> float:
    return max(cheapest_split(images, times).cost_ms / (0.4 + 0.052 * images) for images in range(1, 65))


@pytest.mark.parametrize(
    ("least", "most", "example", "wanted"),
    [
        (1, 64, 8, (64, 32, 16, 8, 4, 2, 1)),
        (1, 64, 12, (64, 32, 16, 12, 8, 4, 2, 1)),
        (3, 9, 5, (9, 8, 5, 4, 3)),
        (5, 5, 5, (5,)),
    ],
)
def test_buckets_are_powers_of_two_the_ends_and_the_example(
    least: int, most: int, example: int, wanted: tuple[int, ...]
) -> None:
    assert buckets(least, most, example) == wanted
