"""Estimates whether compilers finish the chosen subgraphs in the time that a call has left."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from convoy.deadline import Deadline
from convoy.perfdb.row import Measurement
from convoy.problem import EngineConfig

COMPILE_S: Final[Mapping[str, float]] = {"cpu": 2.0, "cuda": 2.0}
"""Seconds that a slow compiler takes for a candidate, by device. Inductor's C++ took 1.0 to 5.9 s, 1.9 s in the mean (27
subgraphs of ResNet-18's training step, two cores). For a GPU other processes compile too. A first answer waited 20 s for the 10
subgraphs of ResNet-50's training step (batch 32, fp32, an H200's machine with 32 cores, 50c0b065), where each process imported
PyTorch's compiler by itself, and 5 to 10 s where they were forked from one that had (16 cores, 14537fcf)."""

COMPILE_SHARE: Final = 0.5
"""Part of the time left that compiling may take; the rest is for building, checking and timing."""

_STARTED: Final = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
"""Rows that are as new were measured by this process, which left their code in the compiler's cache."""


def fits_in_time(
    wanted: Collection[tuple[str, EngineConfig]],
    rows: Mapping[str, Sequence[Measurement]],
    device: str,
    deadline: Deadline,
) -> bool:
    """Whether candidates of slow compilers are compiled in time; without a limit they always are.

    Args:
        wanted: the candidates: keys of problems, with configs of engines that compile slowly (`Engine.starts_quickly` is False).
        rows: the rows that they were chosen from, by problem key.
        device: where they run.
        deadline: that of the call.
    """
    if not deadline.is_limited:
        return True
    known = {
        (key, row.config) for key, _ in wanted for row in rows.get(key, ()) if row.samples and row.date >= _STARTED
    }
    return len(set(wanted) - known) * COMPILE_S.get(device, 0.0) <= COMPILE_SHARE * deadline.left_s
