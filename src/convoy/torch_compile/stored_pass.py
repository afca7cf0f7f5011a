"""A pass of a graph that torch.compile traced, from a stored plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from convoy.pipeline.stored_plans.plan_record import PlanRecord
from convoy.plan import Plan
from convoy.program.runnable_program import Runnable


@dataclass(frozen=True, slots=True)
class StartedPass:
    """A stored plan of a pass with the function that runs it; None: PyTorch runs."""

    plan: Plan
    runnable: Runnable | None


@dataclass(frozen=True, slots=True)
class PassStart:
    """Makes a pass from a stored plan. `run` builds and checks the program, or raises StoredPlanError."""

    run: Callable[[PlanRecord, Plan], Runnable | None]

    def result(self, record: PlanRecord, plan: Plan) -> StartedPass:
        """The plan and the function that runs it; raises StoredPlanError."""
        return StartedPass(plan, self.run(record, plan))
