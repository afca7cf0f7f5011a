"""Processes forked from one that has imported everything: a new one takes seconds. Modules that fork share an xdist group."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Final

PRELOADED: Final = ["pytest", "pydantic", "convoy.cli.app", "convoy.cli.output.progress", "convoy.training.trainer.fit"]
"""Of the one server that Python keeps for a whole test process."""


def start(target: Callable[..., object], *args: object) -> BaseProcess:
    """Run a function in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "torch._dynamo", "torch.export"])
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def wait_for(what: Callable[[], bool], process: BaseProcess, seconds: float = 60.0) -> None:
    """Wait till something has happened that a process does."""
    end = time.monotonic() + seconds
    while not what():
        assert process.is_alive(), f"it ended with {process.exitcode}"
        assert time.monotonic() < end, "it did not come so far in time"
        time.sleep(0.001)


def joined(process: BaseProcess) -> int | None:
    """How a process ended."""
    process.join(60)
    return process.exitcode
