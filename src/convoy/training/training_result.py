"""TrainingResult: what tuning a training step found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from convoy.plan import Plan
from convoy.report.summary import Summary
from convoy.training.step import TrainingStep
from convoy.tuning_profile import TuningProfile


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What `tune_training_step` found.

    Attributes:
        step: the step to call.
        plan: what it runs.
        found: the summary, or what reads it (that of a stored plan); None where a plan was replayed.
        profile: where the time of the call went.
        measured: number of candidates that were measured.
    """

    step: TrainingStep
    plan: Plan
    found: Summary | Callable[[], Summary] | None
    profile: TuningProfile = field(default_factory=TuningProfile)
    measured: int = 0

    @property
    def summary(self) -> Summary | None:
        """Everything that was found out; None where a plan was replayed."""
        return self.found if self.found is None or isinstance(self.found, Summary) else self.found()
