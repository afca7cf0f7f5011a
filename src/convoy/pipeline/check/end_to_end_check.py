"""The end-to-end check of a tuned program: its errors and times beside those of PyTorch's own run."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import torch

from convoy.deadline import Deadline
from convoy.measurement.device.memory_limit import refresh_memory_limit
from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline.check.end_to_end import Latency, OutputErrors, TimingLimits, interleave
from convoy.pipeline.summarize import CheckOutcome
from convoy.plan import Plan
from convoy.program import Program
from convoy.program.runnable_program import eager_of
from convoy.program.step_timeline import ROUNDS, WARM_RUNS, measure_timeline
from convoy.schedule.timeline import Span
from convoy.settings import Effort
from convoy.tuning_profile import phase

TIMED_SEPARATELY = (
    "the plan and PyTorch's own run did not fit in memory together: they were timed one after the other, not in turn"
)
"""Note of a plan that was timed so."""


NO_TIMELINE = "another run of the plan did not fit in memory: there is no timeline"
"""Note of a plan without a timeline."""

TIMELINE_S: Final = 0.1
"""Least time that a timeline is allowed in a call with a time limit, seconds: that of one run of a small net."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """The tuned program or PyTorch's own run, with its errors. It owns the memory that it allocates.

    Attributes:
        name: `convoy`, `torch.eager` or `torch.graph`.
        errors: errors of its results against float64.
        run: launches it once.
    """

    name: str
    errors: OutputErrors
    run: Callable[[], object]


DEFAULT_LIMITS = TimingLimits()
NO_DEADLINE: Final = Deadline()


class EndToEndCheck(ABC):
    """Makes the two runs that are compared: a tuned program's, and PyTorch's own."""

    cuda: bool
    """Whether both run on a GPU."""

    warm: bool = False
    """Whether both have run, as they will be timed, when they are made."""

    @abstractmethod
    def stock(self) -> ComparedRun:
        """PyTorch's own run."""

    @abstractmethod
    def ours(self, program: Program) -> ComparedRun:
        """The tuned program's run."""

    @abstractmethod
    def context(self) -> AbstractContextManager[object]:
        """Context for making and running either."""

    def both(self, program: Program, limits: TimingLimits = DEFAULT_LIMITS) -> CheckOutcome | None:
        """Time both in turn; None if they do not fit in a GPU's memory together."""
        refresh_memory_limit()
        try:
            with self.context():
                with phase("check", "results"):
                    theirs, mine = self.stock(), self.ours(program)
                with phase("check", "time"):
                    runs = {side.name: side.run for side in (theirs, mine)}
                    timed = interleave(runs, cuda=self.cuda, rounds=limits.rounds, most_s=limits.most_s, warm=self.warm)
        except Exception as error:  # everything: out of memory has several types; any other error is raised again
            if not (self.cuda and is_out_of_memory(error)):
                raise
        else:
            return CheckOutcome(timed[theirs.name], timed[mine.name], mine.errors, theirs.errors)
        torch.cuda.empty_cache()
        return None

    def alone(self, make: Callable[[], ComparedRun], limits: TimingLimits) -> tuple[Latency, OutputErrors]:
        """Time one run alone on a GPU; its memory is freed afterwards."""
        refresh_memory_limit()
        with self.context(), phase("check", "time"):
            side = make()
            timed = interleave({side.name: side.run}, cuda=True, rounds=limits.rounds, most_s=limits.most_s)
            found = timed[side.name], side.errors
        del side
        torch.cuda.empty_cache()
        return found


def build_and_check(
    check: EndToEndCheck,
    build: Callable[[], tuple[Plan, Program]],
    rebuild: Callable[[Plan], Program],
    limits: Callable[[], TimingLimits] = TimingLimits,
) -> tuple[Plan, Program, CheckOutcome]:
    """Build a program and compare it with PyTorch's own run: in turn if both fit in memory, else one after the other.

    Args:
        check: makes the runs to compare.
        build: makes plan and program.
        rebuild: makes the program of a plan again.
        limits: how long both are timed; asked when the program is built.

    Returns:
        The plan, with a note if they were timed one after the other; its program; times and errors of both.
    """
    plan, program = build()
    outcome = check.both(program, limits())
    if outcome is not None:
        return plan, program, outcome
    mine, errors = check.alone(lambda: check.ours(program), limits())
    del program  # PyTorch's own run needs the memory
    torch.cuda.empty_cache()
    theirs, their_errors = check.alone(check.stock, limits())
    program = rebuild(dataclasses.replace(plan, notes=(*plan.notes, TIMED_SEPARATELY)))
    return program.plan, program, CheckOutcome(theirs, mine, errors, their_errors)


def with_timeline(
    program: Program,
    inputs: Sequence[torch.Tensor],
    effort: Effort = Effort.QUICK,
    deadline: Deadline = NO_DEADLINE,
    once_s: float = 0.0,
) -> tuple[Program, list[Span]]:
    """The timeline of a program, and the program; its plan has a note if another run does not fit in the GPU's memory.

    Args:
        program: the program. One whose plan is the baseline has no steps and no timeline.
        inputs: tensors of the plan's specs.
        effort: `none` measures one run.
        deadline: when the call must end: there are fewer runs, or no timeline, where they would take longer.
        once_s: time of one run, seconds.
    """
    allowed_s = max(deadline.left_s, TIMELINE_S) if deadline.is_limited else deadline.left_s
    if program.runnable is None or once_s > allowed_s:
        return program, []
    rounds = 1 if effort is Effort.NONE or (ROUNDS + WARM_RUNS) * once_s > allowed_s else ROUNDS
    try:
        with phase("timeline"):
            return program, measure_timeline(eager_of(program.runnable), inputs, rounds=rounds)
    except Exception as error:  # everything: out of memory has several types; any other error is raised again
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    plan = program.plan
    return program.with_plan(dataclasses.replace(plan, notes=(*plan.notes, NO_TIMELINE))), []
