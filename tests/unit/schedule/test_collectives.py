"""Buckets of gradients and their all-reduces as launches."""

from __future__ import annotations

import pytest

from convoy.schedule import allreduce_buckets, buckets, collectives
from convoy.schedule.collectives import BYTES_PER_US, LAST_BUCKET_BYTES, LATENCY_US


def test_buckets_hold_one_dtype_and_stay_under_the_limit():
    assert buckets([40, 40, 40, 400, 4], ["a", "a", "b", "a", "a"], limit=80) == [[0, 1], [2], [3], [4]]
    assert buckets([], []) == []


def test_all_reduces_go_last_layer_first():
    found = collectives(["w1", "w2", "w3"], [30, 30, 60], ["fp32"] * 3, 2, limit=64)
    assert [one.args for one in found] == [("w3",), ("w2", "w1")]
    assert found[0].time_us == pytest.approx(LATENCY_US + 60 / BYTES_PER_US)
    assert collectives(["w1"], [30], ["fp32"], 4)[0].time_us == pytest.approx(LATENCY_US + 45 / BYTES_PER_US)
    assert collectives(["w1"], [30], ["fp32"], 1) == []


MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([], []),
        ([4 * MIB], [[0]]),
        ([400, 300, 200], [[0, 1, 2]]),  # all of it is little enough
        ([8 * MIB, 4 * MIB, 400, 300], [[0, 1], [2, 3]]),
        ([30 * MIB, 8 * MIB, LAST_BUCKET_BYTES - 1, 2], [[0], [1, 2], [3]]),
        ([8 * MIB, LAST_BUCKET_BYTES - 1, 1], [[0], [1, 2]]),
        ([8 * MIB, 400, 4 * MIB], [[0, 1], [2]]),  # the last one is large by itself
        ([20 * MIB, 20 * MIB], [[0], [1]]),
    ],
)
def test_what_leaves_last_is_little(sizes: list[int], wanted: list[list[int]]):
    assert allreduce_buckets(sizes, ["fp32"] * len(sizes)) == wanted
