"""Triton's preparation in threads: begun once, waited for, and silent about what fails."""

import threading
from concurrent.futures import Future

import pytest

from convoy.engines.triton import triton_ahead
from convoy.engines.triton.triton_ahead import launcher_ready, prepare_triton, wait_until_prepared


@pytest.fixture(autouse=True)
def not_begun():
    triton_ahead._begun.cache_clear()
    yield
    wait_until_prepared()
    triton_ahead._begun.cache_clear()


def test_it_is_prepared_once_and_waited_for(monkeypatch):
    begin, runs = threading.Event(), []

    def prepare():
        begin.wait(10)
        runs.append(threading.current_thread().name)

    monkeypatch.setattr(triton_ahead, "_prepare", prepare)
    prepare_triton()
    prepare_triton()
    assert runs == []  # the caller goes on
    begin.set()
    wait_until_prepared()
    assert runs == ["convoy-triton"]


def test_nobody_waits_where_nothing_was_begun(monkeypatch):
    monkeypatch.setattr(triton_ahead, "_prepare", lambda: pytest.fail("begun by waiting"))
    wait_until_prepared()


def test_a_failure_is_left_to_who_needs_triton():
    prepare_triton()  # without a GPU Triton has no driver
    wait_until_prepared()


def test_a_launcher_that_failed_is_waited_for_too():
    failed = Future()
    failed.set_exception(RuntimeError("no compiler"))
    launcher_ready(failed)  # its error comes from the launch, which tries again


def test_no_launcher_without_a_gpu(monkeypatch):
    monkeypatch.setattr(triton_ahead.torch.cuda, "is_available", lambda: False)
    assert triton_ahead.compile_launcher(object()) is None
