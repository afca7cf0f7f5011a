import random

import numpy as np
import pytest

from convoy.measurement.statistics import (
    DISTURBED,
    SampleSummary,
    disturbed_rounds,
    is_faster,
    summarise,
    summarise_rounds,
)


@pytest.mark.parametrize("count", [2, 3, 5, 9, 31])
def test_median_and_spread_agree_with_numpy(count):
    samples = [random.Random(count).lognormvariate(3, 1) for _ in range(count)]
    low, high = np.percentile(samples, [20, 80])
    found = summarise(samples)
    assert found.samples == count
    assert found.median_us == pytest.approx(np.median(samples))
    assert found.spread_us == pytest.approx((high - low) / 2)


def test_one_sample_has_no_spread():
    assert summarise([4.0]) == SampleSummary(1, 4.0, 0.0)


def test_faster_means_by_more_than_either_spread():
    assert is_faster(SampleSummary(9, 80.0, 5.0), SampleSummary(9, 100.0, 10.0))
    assert not is_faster(SampleSummary(9, 91.0, 1.0), SampleSummary(9, 100.0, 10.0))
    assert not is_faster(SampleSummary(9, 91.0, 10.0), SampleSummary(9, 100.0, 1.0))
    assert not is_faster(SampleSummary(9, 100.0, 0.0), SampleSummary(9, 100.0, 0.0))


def steady(rounds=9, **medians):
    rng = random.Random(1)
    return {name: [median * rng.uniform(0.97, 1.03) for _ in range(rounds)] for name, median in medians.items()}


def test_a_throttled_round_is_dropped_for_all():
    samples = steady(a=10.0, b=100.0, c=1000.0)
    for values in samples.values():
        values[4] *= 2
    assert disturbed_rounds(samples) == {4}
    assert {timing.samples for timing in summarise_rounds(samples).values()} == {8}


def test_a_short_candidate_counts_as_much_as_a_long_one():
    samples = steady(a=1.0, b=1.0, c=1e6)
    samples["a"][2] *= 3
    samples["b"][2] *= 3
    assert disturbed_rounds(samples) == {2}


def test_one_noisy_candidate_among_many_condemns_no_round():
    samples = steady(a=10.0, b=10.0, c=10.0)
    samples["a"][3] *= 50
    assert not disturbed_rounds(samples)
    assert summarise_rounds(samples)["a"].median_us == pytest.approx(10.0, rel=0.03)


def test_small_differences_are_noise():
    samples = steady(a=10.0, b=10.0)
    for values in samples.values():
        values[0] *= DISTURBED * 0.96
    assert not disturbed_rounds(samples)


def test_at_most_half_of_the_rounds_go_the_slowest_first():
    samples = {"a": [10.0, 10.0, 10.0, 10.0, 10.0, 14.0, 15.0, 16.0, 17.0], "b": [1.0] * 5 + [1.4, 1.5, 1.6, 1.7]}
    assert disturbed_rounds(samples) == {5, 6, 7, 8}
    mostly_slow = {"a": [10.0, 10.0, 10.0, 100.0, 200.0, 300.0]}
    assert len(disturbed_rounds(mostly_slow)) <= 3


@pytest.mark.parametrize("samples", [{}, {"a": []}, {"a": [1.0]}, {"a": [1.0, 9.0]}, {"a": [0.0, 0.0, 0.0]}])
def test_too_few_or_empty_samples_are_left_alone(samples):
    assert not disturbed_rounds(samples)


def test_never_an_empty_summary():
    rng = random.Random(7)
    for _ in range(300):
        rounds = rng.randint(1, 12)
        samples = {i: [rng.expovariate(1.0) + 1e-3 for _ in range(rounds)] for i in range(rng.randint(1, 4))}
        found = summarise_rounds(samples)
        assert all(timing.samples >= rounds / 2 for timing in found.values())
