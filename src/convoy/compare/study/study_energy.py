"""Energy of one launch: a captured candidate again and again, until the driver's counter has moved enough to be read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from convoy.compare.energy import counter_of
from convoy.errors import ConvoyError
from convoy.measurement.candidate import prepare
from convoy.measurement.device.nvml import gpu_of
from convoy.measurement.failure import Failure
from convoy.measurement.reference_data import ReferenceData
from convoy.measurement.timer import GRAPH_LAUNCHES, captured
from convoy.perfdb import Measurement
from convoy.problem import parse_problem
from convoy.target import Target

SECONDS: Final = 1.0
"""How long a candidate runs for one figure: the counter moves every 20 to 100 ms, so the figure is good to a few per cent."""


def gpu_counter() -> Callable[[], float] | None:
    """The energy counter of torch's current GPU, or None where there is none."""
    if not torch.cuda.is_available():
        return None
    return counter_of(gpu_of(torch.cuda.current_device()))


def launch_joules(
    target: Target, counter: Callable[[], float], extra: tuple[str, ...] = (), seconds: float = SECONDS
) -> Callable[[Measurement], float | None]:
    """A function that returns the joules of one launch of a row's config; None where it cannot be run again.

    Args:
        target: the device.
        counter: joules used so far.
        extra: extra engines as `id=module:Class`.
        seconds: how long each runs.
    """

    @torch.no_grad()
    def joules(row: Measurement) -> float | None:
        try:
            bench = ReferenceData(parse_problem(row.problem), target)
            bench.fill()
            run, each = _in_a_row(prepare(bench, row.config, extra).launch, target)
        except (
            Failure,
            ConvoyError,
            RuntimeError,
        ):  # the row says how it ended when it was measured; here there is no figure
            return None
        run()
        _wait(target)
        before, start, launches = counter(), time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for _ in range(32):
                run()
            launches += 32 * each
            _wait(target)
        return (counter() - before) / launches

    return joules


def _in_a_row(launch: Callable[[], object], target: Target) -> tuple[Callable[[], object], int]:
    """The function to repeat, and how many launches it makes: a graph of many on a GPU.

    Launched by the host one at a time, a kernel of 3 us leaves the device idle for 10: that power was counted as its own, up to
    3 kW of it (H200, 700 W).
    """
    if target.device != "cuda":
        return launch, 1
    return captured(launch, GRAPH_LAUNCHES).replay, GRAPH_LAUNCHES


def _wait(target: Target) -> None:
    if target.device == "cuda":
        torch.cuda.synchronize()
