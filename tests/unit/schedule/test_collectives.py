"""Buckets of gradients and their all-reduces as launches."""

from __future__ import annotations

import pytest

from convoy.schedule import buckets, collectives
from convoy.schedule.collectives import BYTES_PER_US, LATENCY_US


def test_buckets_hold_one_dtype_and_stay_under_the_limit():
    assert buckets([40, 40, 40, 400, 4], ["a", "a", "b", "a", "a"], limit=80) == [[0, 1], [2], [3], [4]]
    assert buckets([], []) == []


def test_all_reduces_go_last_layer_first():
    found = collectives(["w1", "w2", "w3"], [30, 30, 60], ["fp32"] * 3, 2, limit=64)
    assert [one.args for one in found] == [("w3",), ("w2", "w1")]
    assert found[0].time_us == pytest.approx(LATENCY_US + 60 / BYTES_PER_US)
    assert collectives(["w1"], [30], ["fp32"], 4)[0].time_us == pytest.approx(LATENCY_US + 45 / BYTES_PER_US)
    assert collectives(["w1"], [30], ["fp32"], 1) == []
