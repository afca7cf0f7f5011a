"""A model's program from a stored plan: built, compared with the model's own outputs, and not timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convoy.engines.torch_flags import unsearched_convolutions
from convoy.graph.randomness import draws_random
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.least_error import least_error
from convoy.pipeline.check.net_check import NetCheck
from convoy.pipeline.check.rounding import fixed_seed
from convoy.pipeline.isolation import IsolatedCopy
from convoy.pipeline.net import Net
from convoy.pipeline.observer import Stopwatch
from convoy.pipeline.optimize_result import OptimizeResult
from convoy.pipeline.stored_plans.plan_record import PlanRecord
from convoy.pipeline.stored_plans.start import agrees, build_stored, checked
from convoy.plan import Plan
from convoy.program import OptimizedModule, Program
from convoy.program.program_cache import Tuner
from convoy.settings import Settings


@dataclass(frozen=True, slots=True)
class InferenceStart:
    """A captured model that starts from a stored plan.

    Attributes:
        model: the model.
        given: its arguments.
        isolated: a copy of it that may be run.
        net: the net.
        settings: those of the call.
        tuner: makes programs for further arguments of the module that is returned.
        clock: counts the seconds of the call.
    """

    model: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    isolated: IsolatedCopy
    net: Net
    settings: Settings
    tuner: Tuner
    clock: Stopwatch

    def result(self, record: PlanRecord, plan: Plan) -> OptimizeResult:
        """The module that runs the plan.

        Args:
            record: the stored plan.
            plan: its plan, with notes of this call.

        Raises:
            StoredPlanError: it cannot be built, or its results are wrong.
        """
        program = build_stored(plan, self.net, self.settings)
        said: list[str] = []
        if program.runnable is not None:
            checked(lambda: self._why_wrong(program, record, said))
        module = OptimizedModule(self.model, program, *self.given, self.tuner, self.settings.check)
        summary = record.summary(self.net.name, program.plan, self.clock.seconds)
        return OptimizeResult(module, program.plan, summary, tuple(said))

    def _why_wrong(self, program: Program, record: PlanRecord, said: list[str]) -> str:
        """Why the outputs are wrong; empty if they are right. Notes on PyTorch's own outputs are added to `said`."""
        least = least_error(str(self.settings.numerics), self.net.captured.graph)
        random = any(map(draws_random, self.net.captured.graph.nodes))
        if not random and self._agrees(program, record, least):
            return ""
        check = NetCheck(self.net, self.isolated, self.settings.effort)
        with check.context():
            errors, baseline = check.ours(program).errors, check.baseline_errors
        said += [check.wrong] if check.wrong else []
        return end_to_end.why_wrong("the outputs'", errors, baseline, least)

    def _agrees(self, program: Program, record: PlanRecord, least: float) -> bool:
        # A model whose run was recorded changes nothing of itself.
        recorded = self.net.captured.was_run
        model = self.isolated.model if recorded else self.isolated.another().model
        (args, kwargs), (given, named) = self.isolated.arguments(), self.isolated.arguments()
        device = torch.device(self.net.target.device)
        with torch.no_grad(), unsearched_convolutions(device), fixed_seed():
            stock = end_to_end.detached_outputs(model(*given, **named))
        with torch.no_grad(), fixed_seed():
            ours = end_to_end.detached_outputs(program(args, kwargs))
        return agrees(ours, stock, record, least)
