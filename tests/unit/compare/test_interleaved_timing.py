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
    return {"latency_ms": list(values), "flow_ms": list(values)}


def test_frameworks_take_turns_and_one_that_fails_is_asked_no_more() -> None:
    log: list[str] = []
    children: dict[str, Any] = {"a": Child("a", log, 1, 1, 1), "b": Child("b", log, 2), "c": Child("c", log, 3, 3, 3)}
    failures: list[tuple[str, str]] = []
    found = take_rounds(children, 3, lambda name, error: failures.append((children.pop(name).name, error.status)))
    assert "".join(log) == "abcabcac"
    assert failures == [("b", "crashed")]
    assert found == {"a": samples(1, 1, 1), "c": samples(3, 3, 3)}


def test_a_round_that_was_slow_for_all_is_dropped() -> None:
    children: dict[str, Any] = {"a": Child("a", [], 1, 1, 5, 1), "b": Child("b", [], 2, 2, 9, 2)}
    assert take_rounds(children, 4, lambda *_: None) == {"a": samples(1, 1, 1), "b": samples(2, 2, 2)}


def test_noisy_rounds_are_taken_again_until_none_is_left_to_ask() -> None:
    noisy, quieter = samples(1.0, 2.0, 4.0), samples(1.0, 2.0, 3.0)
    rounds = iter([{"a": noisy, "b": quieter}, {"a": quieter}, {}])
    assert quietest(lambda: next(rounds)) == {"a": quieter, "b": quieter}
    rounds = iter([{"a": noisy}, {}, {"a": quieter}])
    assert quietest(lambda: next(rounds)) == {"a": noisy}
