"""A training step from a stored plan: built, compared with PyTorch's own loss and gradients, and not timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from convoy.engines.torch_flags import unsearched_convolutions
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.rounding import fixed_seed
from convoy.pipeline.net import Net
from convoy.pipeline.stored_plans.plan_record import PlanRecord
from convoy.pipeline.stored_plans.start import agrees, build_stored, checked
from convoy.plan import Plan
from convoy.program import Program
from convoy.settings import Settings
from convoy.training.stock_step import StepCheck, StockStep

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class StepStart(Generic[_Result]):
    """A captured step that starts from a stored plan.

    Attributes:
        net: the step as a net.
        settings: those of the call.
        stock: makes PyTorch's step on copies.
        inputs: parameters, buffers and batch.
        results: number of the graph's outputs that are the loss and the gradients.
        check: makes the check against float64, for results that are not near enough to PyTorch's own.
        wrap: makes what the call returns.
    """

    net: Net
    settings: Settings
    stock: Callable[[], StockStep]
    inputs: list[torch.Tensor]
    results: int
    check: Callable[[], StepCheck]
    wrap: Callable[[PlanRecord, Program], _Result]

    def result(self, record: PlanRecord, plan: Plan) -> _Result:
        """The program of the plan; raises StoredPlanError if it cannot be built, or its results are wrong."""
        program = build_stored(plan, self.net, self.settings)
        if program.runnable is not None:
            checked(lambda: self._why_wrong(program, record))
        return self.wrap(record, program)

    def _why_wrong(self, program: Program, record: PlanRecord) -> str:
        runnable = program.runnable
        assert runnable is not None
        stock = self.stock()
        with unsearched_convolutions(self.inputs[0].device), fixed_seed():
            theirs = stock.run()
        with fixed_seed(), torch.no_grad():
            ours = runnable(self.inputs)[: self.results]
        if agrees(ours, theirs, record, end_to_end.LEAST_ERROR):
            return ""
        del stock, theirs, ours  # the check needs the memory
        check = self.check()
        with check.context():
            errors = check.ours(program).errors
        allowed = check.allowed(errors, check.baseline_errors, self.settings.numerics)
        return end_to_end.why_wrong("the gradients'", errors, allowed, end_to_end.LEAST_ERROR)
