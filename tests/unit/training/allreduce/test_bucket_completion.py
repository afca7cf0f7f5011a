"""After which launch a bucket is complete, and which launches' marks its stream waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convoy.training.allreduce.bucket_completion import BucketCompletion

WAITS = [{0, 3}, {1}, {2, 3}]


def begun(made: BucketCompletion, launches: int) -> dict[int, list[int]]:
    return {index: list(found) for index in range(launches) if (found := made.after(index))}


def test_a_bucket_is_complete_with_the_last_launch_that_it_waits_for():
    assert begun(BucketCompletion(WAITS), 5) == {1: [1], 3: [0, 2]}


def test_in_order_none_is_complete_before_those_in_front_of_it():
    assert begun(BucketCompletion(WAITS, in_order=True), 5) == {3: [0, 1, 2]}


def test_nothing_is_marked_without_a_stream():
    made = BucketCompletion(WAITS)
    begun(made, 4)
    assert made.events([0, 1, 2]) == []


def test_a_stream_waits_for_the_launches_of_its_buckets_alone(monkeypatch: pytest.MonkeyPatch):
    marks = iter(range(10))
    current = SimpleNamespace(record_event=lambda: next(marks))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current)
    stream: Any = SimpleNamespace(device="cuda")
    made = BucketCompletion([{4}, {1, 2}, {2, 3}], stream)
    begun(made, 4)  # marks 0, 1, 2 for launches 1, 2, 3: launch 0 is nobody's
    assert made.events([1]) == [0, 1]
    assert made.events([1, 2]) == [0, 1, 2]
    made.end()
    with pytest.raises(KeyError):
        made.events([1])
