"""Runs everything once in place of timing it end to end, which takes seconds and decides nothing here. Not a test module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from convoy.pipeline.check import end_to_end, end_to_end_check


def once(runs: dict[str, Callable[[], object]], **_: Any) -> dict[str, end_to_end.Latency]:
    """Stands for `verdict.interleave`."""
    for run in runs.values():
        run()
    return {name: end_to_end.Latency(name, (1.0,)) for name in runs}


def keep_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every plan that is right; nothing is timed end to end."""
    monkeypatch.setattr(end_to_end, "is_faster", lambda result, baseline: True)
    for module in (end_to_end, end_to_end_check):
        monkeypatch.setattr(module, "interleave", once)


@contextmanager
def plans_kept() -> Iterator[None]:
    """`keep_plans` for a while."""
    with pytest.MonkeyPatch.context() as patch:
        keep_plans(patch)
        yield
