"""Further tuning of a program that runs already: the better one of both programs is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch

from convoy.deadline import Deadline
from convoy.pipeline.check.end_to_end import TimingLimits, interleave, is_faster
from convoy.pipeline.isolation import preserve_global_state
from convoy.pipeline.optimize_result import OptimizeResult
from convoy.pipeline.tune_in_time import overrun_note
from convoy.program import CudaGraphProgram, Program
from convoy.settings import Effort, Settings
from convoy.user_warning import warn_user

COMPARE_SHARE: Final = 0.1
"""Share of the time that is kept for timing the new program beside the old one."""

WORTHWHILE_SHARE: Final = 0.3
"""A search at effort `full` follows a complete one at `quick` if this share of the time is left."""

TuneOnce = Callable[[Settings, Deadline], OptimizeResult]
"""Tunes the same model and arguments once more, under these settings and within this time."""


def improved(
    program: Program, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, time_s: float, tune: TuneOnce
) -> Program:
    """The best program that is found in further `time_s` seconds; the given one if none is faster.

    Rows of earlier searches are in the database, so the search goes on where it stopped: at effort `quick`, and at `full` when
    that is complete. A call that takes longer than its time says so.

    Args:
        program: the program that runs now.
        args: its arguments, for timing.
        kwargs: its keyword arguments.
        settings: those that it was made with.
        time_s: wall time of the whole call, seconds.
        tune: tunes once more.
    """
    deadline = Deadline(time_s)
    best = program
    first = Effort.QUICK if settings.effort is Effort.NONE else settings.effort
    for effort in dict.fromkeys((first, Effort.FULL)):
        if effort is not first and deadline.left_s < WORTHWHILE_SHARE * time_s:
            break
        until = deadline.earlier(COMPARE_SHARE * deadline.left_s)
        found = tune(dataclasses.replace(settings, effort=effort, time_s=deadline.left_s), until)
        best = _faster(best, found.program.programs[0], args, kwargs, deadline)
    if late := overrun_note(deadline, measured=1):
        warn_user(late)
    return best


def _faster(old: Program, new: Program, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: Deadline) -> Program:
    """The new program if it is faster than the old one in four of five rounds, in turn; PyTorch's own run counts as old."""
    if new.runnable is None or _same(old, new):
        return old
    if old.runnable is None:  # it was timed against PyTorch's own run when it was checked
        return new
    with preserve_global_state(), torch.no_grad():
        timed = interleave(
            {"old": _run_of(old, args, kwargs), "new": _run_of(new, args, kwargs)},
            cuda=isinstance(old.runnable, CudaGraphProgram),
            most_s=TimingLimits.of(Effort.QUICK, deadline).most_s,
        )
    return new if is_faster(timed["new"], timed["old"]) else old


def _same(old: Program, new: Program) -> bool:
    """Whether two programs run the same steps on the same streams."""
    return [(s.config, s.results, s.stream) for s in old.plan.steps] == [
        (s.config, s.results, s.stream) for s in new.plan.steps
    ]


def _run_of(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    runnable = program.runnable
    return runnable.replay if isinstance(runnable, CudaGraphProgram) else lambda: program(args, kwargs)
