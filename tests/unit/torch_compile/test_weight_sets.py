"""Which weights were packed: by identity, without keeping them alive, and patiently where they keep changing."""

from __future__ import annotations

import gc

import torch

from convoy.torch_compile.weight_sets import MOST_PATIENCE, WORTH_PACKING, PackedWeights, WeightSets, version_of


def weights(count: int = 2) -> list[torch.Tensor]:
    return [torch.randn(3) for _ in range(count)]


def packed(sets: WeightSets, given: list[torch.Tensor]) -> PackedWeights:
    found = sets.of(given)
    found.pack(given, version_of(given), lambda: None)
    return found


def test_a_set_is_found_by_its_tensors_and_goes_with_the_first_of_them():
    sets, one, other = WeightSets(), weights(), weights()
    assert packed(sets, one) is sets.of(one)
    assert packed(sets, other) is not sets.of(one)
    assert sets.of(list(reversed(one))) is not sets.of(one)
    found = sets.of(one)
    del one[1]
    gc.collect()
    assert found.run is None
    assert found.held == []
    assert sets.of(other).run is not None


def test_the_least_recently_used_set_is_dropped_first():
    sets = WeightSets(most=2)
    first, second, third = weights(), weights(), weights()
    kept = [packed(sets, given) for given in (first, second)]
    sets.of(first)
    packed(sets, third)
    assert len(sets) == 2
    assert kept[0].run is not None
    assert kept[1].run is None


def test_no_weights_are_a_set_too():
    sets = WeightSets()
    assert packed(sets, []) is sets.of([])


def test_a_stamp_differs_after_every_change_that_is_counted():
    given = weights()
    seen = [version_of(given)]
    given[0].add_(1)
    seen.append(version_of(given))
    given[1].data = torch.randn(3)
    seen.append(version_of(given))
    torch.autograd.graph.increment_version(given[:1])
    seen.append(version_of(given))
    assert len(set(seen)) == len(seen)
    with torch.inference_mode():
        assert version_of(weights())[0] == 0


def test_what_is_packed_keeps_its_memory_until_it_is_let_go():
    """Else new values could lie at the old address."""
    given = weights(1)
    found = packed(WeightSets(), given)
    address = given[0].data_ptr()
    for _ in range(20):
        given[0].data = torch.randn(3)
        assert given[0].data_ptr() != address
    found.release()


def test_weights_that_change_in_every_call_wait_longer_and_longer():
    sets, given = WeightSets(), weights()
    found = sets.of(given)
    waits = []
    for _ in range(12):
        given[0].add_(1)
        calls = 1
        while not found.is_due(version_of(given)):
            calls += 1
        found.pack(given, version_of(given), lambda: None)
        waits.append(calls - 1)
    assert waits[:4] == [0, 1, 2, 4]
    assert max(waits) == MOST_PATIENCE
    for _ in range(WORTH_PACKING):
        assert found.is_current(version_of(given))
    given[0].add_(1)
    assert found.is_due(version_of(given))


def test_sets_that_end_after_few_calls_are_packed_only_where_one_comes_again():
    sets = WeightSets()
    for _ in range(WORTH_PACKING):
        packed(sets, weights())
    given = weights()
    found = sets.of(given)
    due = [found.is_due(version_of(given)) for _ in range(WORTH_PACKING + 1)]
    assert due == [False] * WORTH_PACKING + [True]
