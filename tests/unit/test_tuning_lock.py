"""One thread tunes at a time; one out of torch.compile and one that needs Dynamo later do not block each other."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from convoy.tuning_lock import one_at_a_time, with_dynamo

DYNAMO = "torch._dynamo.convert_frame"
SOON = 20.0
"""Seconds after which a test gives up; it takes milliseconds."""


def test_one_thread_is_inside_and_may_come_again() -> None:
    order: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with one_at_a_time(), one_at_a_time():
            inside.set()
            go_on.wait(SOON)
            order.append("first")

    def second() -> None:
        with one_at_a_time():
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(SOON)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(SOON)
    assert order == ["first", "second"]


def test_dynamos_lock_is_held_where_dynamo_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()
    monkeypatch.setitem(sys.modules, DYNAMO, SimpleNamespace(compile_lock=lock))  # type: ignore[misc]
    with one_at_a_time():
        assert lock.locked()
    assert not lock.locked()
    with with_dynamo():
        assert lock.locked()
    assert not lock.locked()


@pytest.mark.parametrize("levels", [1, 2])
def test_who_needs_dynamo_later_lets_a_call_out_of_torch_compile_go_first(
    monkeypatch: pytest.MonkeyPatch, levels: int
) -> None:
    """Dynamo is imported, and its lock taken, by another thread while this one tunes."""
    monkeypatch.delitem(sys.modules, DYNAMO, raising=False)
    lock, compiling = threading.RLock(), threading.Event()
    order: list[str] = []

    def compile_() -> None:
        monkeypatch.setitem(sys.modules, DYNAMO, SimpleNamespace(compile_lock=lock))  # type: ignore[misc]
        with lock:
            compiling.set()
            with one_at_a_time():
                order.append("torch.compile tunes")

    def tune(depth: int) -> None:
        with one_at_a_time():
            if depth > 1:
                tune(depth - 1)
                return
            threading.Thread(target=compile_, daemon=True).start()
            assert compiling.wait(SOON)
            with with_dynamo():
                order.append("Inductor compiles")

    tuning = threading.Thread(target=tune, args=(levels,), daemon=True)
    tuning.start()
    tuning.join(SOON)
    assert order == ["torch.compile tunes", "Inductor compiles"]

    def again() -> None:
        with one_at_a_time():
            order.append("free")

    free = threading.Thread(target=again, daemon=True)
    free.start()
    free.join(SOON)
    assert order[-1] == "free"
