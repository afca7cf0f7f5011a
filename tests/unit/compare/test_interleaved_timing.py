"""Rounds in turn: their order, one that fails among them, and noise."""

from __future__ import annotations

from typing import Any

from convoy.compare.child_session import ChildFailedError
from convoy.compare.interleaved_timing import quietest, take_rounds


class Child:
    """Gives its numbers one by one, and fails when there are none left."""

    def __init__(self, name: str, log: list[str], *values: float) -> None:
        self.name, self.log, self.values = name, log, list(values)

    def ask(self, message: dict[str, Any], name: str) -> dict[str, list[float]]:
        assert (message, name) == ({"do": "sample", "rounds": 1}, "samples")
        self.log.append(self.name)
        if not self.values:
            raise ChildFailedError("crashed", "no more")
        return samples(self.values.pop(0))


def samples(*values: float) -> dict[str, list[float]]:
    return {"latency_ms": list(values), "single_ms": [value for value in values for _ in range(3)]}


def test_frameworks_take_turns_and_one_that_fails_is_asked_no_more() -> None:
    log: list[str] = []
    children: dict[str, Any] = {"a": Child("a", log, 1, 1, 1), "b": Child("b", log, 2), "c": Child("c", log, 3, 3, 3)}
    failures: list[tuple[str, str]] = []
    found = take_rounds(children, 3, lambda name, error: failures.append((children.pop(name).name, error.status)))
    assert sorted(log[:3]) == sorted(log[3:6]) == ["a", "b", "c"]
    assert sorted(log[6:]) == ["a", "c"]
    assert failures == [("b", "crashed")]
    assert found == {"a": samples(1, 1, 1), "c": samples(3, 3, 3)}


def test_the_order_is_drawn_anew_in_each_round() -> None:
    log: list[str] = []
    names = "abcdef"
    take_rounds({name: Child(name, log, *[1.0] * 8) for name in names}, 8, lambda *_: None)  # type: ignore[misc]
    rounds = ["".join(log[start : start + 6]) for start in range(0, 48, 6)]
    assert all(sorted(one) == list(names) for one in rounds)
    assert len(set(rounds)) > 4
    assert len({one[0] for one in rounds}) > 2


def test_a_round_that_was_slow_for_all_is_dropped() -> None:
    children: dict[str, Any] = {"a": Child("a", [], 1, 1, 5, 1), "b": Child("b", [], 2, 2, 9, 2)}
    assert take_rounds(children, 4, lambda *_: None) == {"a": samples(1, 1, 1), "b": samples(2, 2, 2)}


def test_noisy_rounds_are_taken_again_until_none_is_left_to_ask() -> None:
    noisy, quieter = samples(1.0, 2.0, 4.0), samples(1.0, 2.0, 3.0)
    rounds = iter([{"a": noisy, "b": quieter}, {"a": quieter}, {}])
    assert quietest(lambda: next(rounds)) == {"a": quieter, "b": quieter}
    rounds = iter([{"a": noisy}, {}, {"a": quieter}])
    assert quietest(lambda: next(rounds)) == {"a": noisy}
