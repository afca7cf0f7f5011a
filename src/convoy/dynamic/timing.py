"""Time of one call, for choosing among programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

LEAST_S: Final = 0.01
"""Seconds that a program is timed at least, if a call is not longer."""

ROUNDS: Final = 5
"""Rounds of which the shortest counts: anything else that runs on the machine makes a round longer."""


def call_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call of several made one after another, with the wait for the device at their end."""
    run()
    repeats = max(1, min(1000, round(LEAST_S / ROUNDS / max(_seconds(run, 1, device), 1e-6))))
    return min(_seconds(run, repeats, device) for _ in range(ROUNDS)) / repeats * 1e3


def _seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
