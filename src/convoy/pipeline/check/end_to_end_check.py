"""The end-to-end check: a tuned program and PyTorch's own, held to float64 and to the clock."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from convoy.measurement.device.memory_limit import refresh_memory_limit
from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline.check.end_to_end import Latency, OutputErrors, interleave
from convoy.pipeline.summarize import CheckOutcome
from convoy.plan import Plan
from convoy.program import Program
from convoy.program.runnable_program import eager_of
from convoy.program.step_timeline import measure_timeline
from convoy.schedule.timeline import Span

TIMED_SEPARATELY = (
    "there was no room for PyTorch's own beside the plan: they were timed one after the other, and not in turn"
)
"""What a plan says of times that were taken so."""


NO_TIMELINE = (
    "there was no room for another run of the plan: when its steps run was not measured, and there is no timeline"
)
"""What a plan says that has no timeline."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of both, made and compared with float64. What it allocates lives as long as it does.

    Attributes:
        name: `convoy`, or how PyTorch's own is run.
        errors: of its results.
        run: launches it once.
    """

    name: str
    errors: OutputErrors
    run: Callable[[], object]


class EndToEndCheck(ABC):
    """Knows what a program is compared with, on a device, and makes both sides of the comparison."""

    cuda: bool
    """Whether they run on a GPU."""

    @abstractmethod
    def stock(self) -> ComparedRun:
        """PyTorch's own."""

    @abstractmethod
    def ours(self, program: Program) -> ComparedRun:
        """A tuned program."""

    @abstractmethod
    def context(self) -> AbstractContextManager[None]:
        """What is to hold while either is made or runs."""

    def both(self, program: Program) -> CheckOutcome | None:
        """Both, timed in turn; None where a GPU has no room for both at once."""
        refresh_memory_limit()
        try:
            with self.context():
                theirs, mine = self.stock(), self.ours(program)
                timed = interleave({side.name: side.run for side in (theirs, mine)}, cuda=self.cuda)
        except Exception as error:
            if not (self.cuda and is_out_of_memory(error)):
                raise
        else:
            return CheckOutcome(timed[theirs.name], timed[mine.name], mine.errors, theirs.errors)
        torch.cuda.empty_cache()
        return None

    def alone(self, make: Callable[[], ComparedRun]) -> tuple[Latency, OutputErrors]:
        """One side by itself, on a GPU; nothing of it is left afterwards."""
        refresh_memory_limit()
        with self.context():
            side = make()
            found = interleave({side.name: side.run}, cuda=True)[side.name], side.errors
        del side
        torch.cuda.empty_cache()
        return found


def build_and_check(
    check: EndToEndCheck, build: Callable[[], tuple[Plan, Program]], rebuild: Callable[[Plan], Program]
) -> tuple[Plan, Program, CheckOutcome]:
    """Build a program and compare it with PyTorch's own: in turn where there is room for both, else one after the other.

    Args:
        check: compares.
        build: makes plan and program.
        rebuild: makes the program of that plan anew.

    Returns:
        The plan, with a note where they were timed apart; its program; times and errors of both.
    """
    plan, program = build()
    outcome = check.both(program)
    if outcome is not None:
        return plan, program, outcome
    mine, errors = check.alone(lambda: check.ours(program))
    del program  # its memory is wanted
    torch.cuda.empty_cache()
    theirs, their_errors = check.alone(check.stock)
    program = rebuild(dataclasses.replace(plan, notes=(*plan.notes, TIMED_SEPARATELY)))
    return program.plan, program, CheckOutcome(theirs, mine, errors, their_errors)


def with_timeline(program: Program, inputs: Sequence[torch.Tensor]) -> tuple[Program, list[Span]]:
    """The timeline of a program, and the program; its plan has a note if another run does not fit in the GPU's memory.

    Args:
        program: the program. One whose plan is the baseline has no steps and no timeline.
        inputs: tensors of the plan's specs.
    """
    if program.runnable is None:
        return program, []
    try:
        return program, measure_timeline(eager_of(program.runnable), inputs)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    plan = program.plan
    return program.with_plan(dataclasses.replace(plan, notes=(*plan.notes, NO_TIMELINE))), []
