"""How long a run takes when nothing disturbs it: the same figure in every process, also on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

AGREEING: Final = 5
"""Samples that must agree. Disturbances only make runs slower, and differ; the undisturbed time is the one that comes again."""

AGREEMENT: Final = 0.02
"""Share by which they may differ."""

APART_S: Final = 0.03
"""Least seconds between the first and the last of them: a disturbance that lasts, such as another process on the same core, makes
neighbouring samples equally slow."""

LEAST_S: Final = 0.1
MOST_S: Final = 0.5
"""Seconds for one figure: at least, and at most if no samples agree. A quiet machine needs the least."""

SAMPLE_S: Final = 2e-3
"""Least length of a sample on a GPU: launching and waiting for the result takes about 10 us of it."""

MOST_CALLS: Final = 1000


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds for one figure: at least, and at most if no samples agree; None: `LEAST_S`, `MOST_S`."""

    least_s: float | None = None
    most_s: float | None = None


PATIENT: Final = Patience()

BRIEF: Final = Patience(0.03, 0.06)
"""For a first answer, which is there at once."""


@dataclass(frozen=True, slots=True)
class ShortestRun:
    """The shortest sample of a run, and whether `AGREEING` samples were as short."""

    time_s: float
    settled: bool


@dataclass(frozen=True, slots=True)
class Rate:
    """Work per second, and whether it came again from sample to sample."""

    per_s: float
    settled: bool

    @staticmethod
    def of(work: float, found: ShortestRun) -> Rate:
        """The rate of some work that took so long."""
        return Rate(work / found.time_s, found.settled)


NO_RATE: Final = Rate(0.0, settled=True)


def faster(first: Rate, second: Rate) -> Rate:
    """The higher rate."""
    return max(first, second, key=lambda rate: rate.per_s)


def shortest_run(
    run: Callable[[], object],
    device: str,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], object] | None = None,
    patience: Patience = PATIENT,
) -> ShortestRun:
    """Time a run that nothing disturbs: the shortest sample, as soon as `AGREEING` samples agree. The first runs are not timed.

    Args:
        run: starts one run.
        device: `cpu` or `cuda`. On a GPU several runs make one sample.
        clock: seconds, of the host.
        wait: returns when the device has finished; torch's own by default.
        patience: how long it may take.
    """
    shortest_s = LEAST_S if patience.least_s is None else patience.least_s
    longest_s = MOST_S if patience.most_s is None else patience.most_s
    finish = wait or (torch.cuda.synchronize if device == "cuda" else _nothing)
    begin = clock()
    run()
    finish()
    calls = 1
    if device == "cuda":
        start = clock()
        run()
        finish()
        calls = max(1, min(MOST_CALLS, round(SAMPLE_S / max(clock() - start, 1e-9))))
    near: list[tuple[float, float]] = []  # (time, when) of the samples that agree with the shortest
    while True:
        start = clock()
        for _ in range(calls):
            run()
        finish()
        end = clock()
        near.append(((end - start) / calls, start))
        least_s = min(near)[0]
        near = [sample for sample in near if sample[0] <= (1 + AGREEMENT) * least_s]
        agree = len(near) >= AGREEING and near[-1][1] - near[0][1] >= APART_S
        if end - begin > (shortest_s if agree else longest_s):
            return ShortestRun(least_s, settled=agree)


def _nothing() -> None:
    pass
