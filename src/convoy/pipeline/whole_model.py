"""Tuning a model as one graph: capture, measure, select, build and check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import nn

from convoy.collection_pause import collection_paused, old_objects_skipped
from convoy.deadline import Deadline
from convoy.measurement import Peaks
from convoy.measurement.device.memory_limit import memory_limited
from convoy.measurement.processes.threaded_builds import cores_shared
from convoy.perfdb import Database
from convoy.pipeline.captured_net import captured_net
from convoy.pipeline.ceilings import ceiling_notes, ceilings_of
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.end_to_end_check import build_and_check, with_timeline
from convoy.pipeline.check.least_error import least_error
from convoy.pipeline.check.net_check import NetCheck
from convoy.pipeline.check.verify_predicted import BuiltPlan
from convoy.pipeline.isolation import IsolatedCopy, isolate
from convoy.pipeline.measure_net import prediction_notes, with_counted_zeros
from convoy.pipeline.net import Net
from convoy.pipeline.observer import Observer, Stopwatch
from convoy.pipeline.optimize_result import OptimizeResult
from convoy.pipeline.plan_target import device_of, target_for
from convoy.pipeline.rivals.fusing_rivals import FUSING, fusing_rivals
from convoy.pipeline.rivals.whole_rivals import fastest_of, rivals_of
from convoy.pipeline.schedules import build_fastest, builds_of
from convoy.pipeline.select import make_plan, select, stock_defects
from convoy.pipeline.stored_plans.plan_store import plan_store
from convoy.pipeline.stored_plans.start import start_stored
from convoy.pipeline.stored_plans.start_inference import InferenceStart
from convoy.pipeline.summarize import CheckOutcome, SummaryOnDemand, brief_summary, summarize
from convoy.pipeline.tune_in_time import TunedPlan, answers_first, tune_in_time
from convoy.plan import Plan
from convoy.program import OptimizedModule, Program, build_program
from convoy.program.program_cache import Tuner
from convoy.schedule.timeline import Span
from convoy.settings import Effort, Settings
from convoy.tune import SearchResult
from convoy.tuning_profile import phase


def tune_whole(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    settings: Settings,
    watch: Observer,
    tuner: Tuner,
    deadline: Deadline,
) -> OptimizeResult:
    """Tune a model as one graph. Only copies of the model are run.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        name: the user's name for it.
        settings: effort, limits and what is allowed.
        watch: called with the progress.
        tuner: makes programs for further arguments of the module that is returned.
        deadline: when the call must end.

    Raises:
        CaptureError: the model cannot be copied, captured, or replaced by a graph.
    """
    target = target_for(device_of(model, args, kwargs))
    limited = memory_limited(target.device, settings.tuning_memory_bytes, isolate=settings.isolate)
    with limited, old_objects_skipped() as visit_again:
        with phase("copy the model"):
            isolated = isolate(model, args, kwargs)
        net = captured_net(name, isolated, settings, target)
        with Database.open(settings.db) as database:
            clock = Stopwatch()
            net = with_counted_zeros(net, settings, watch)
            store = plan_store("inference", database, net, settings)
            start = InferenceStart(model, (args, kwargs), isolated, net, settings, tuner, clock)
            started = start_stored(store, start)
            if isinstance(started, OptimizeResult):
                return started
            if settings.effort is not Effort.NONE:
                visit_again()  # measuring takes minutes, in which the user's garbage may hold memory
            ceilings = ceilings_of(target, settings, deadline)
            check = cache(partial(NetCheck, net, isolated, settings.effort))
            if not answers_first(settings, deadline):
                check()  # before measuring, which needs the memory; a first answer's kernels compile meanwhile
            net = dataclasses.replace(net, original=None, ceilings=ceilings)  # the check alone runs the original
            job = _Job(model, (args, kwargs), isolated, net, settings, ceilings, check, tuner, started)
            tuned = tune_in_time(net, settings, database, watch, deadline, partial(job.build, database, clock, watch))
            result = job.conclude(tuned, deadline)
            if tuned.complete:
                store.keep(result.plan, check().baseline_errors.rel_l2_error, brief_summary(result.found))
        return result


@dataclass(frozen=True, slots=True)
class _Job:
    """A measured net, to be built and checked.

    `check` runs the references when it is first called. `not_started` says why a stored plan was not used.
    """

    model: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    isolated: IsolatedCopy
    net: Net
    settings: Settings
    ceilings: Peaks | None
    check: Callable[[], NetCheck]
    tuner: Tuner
    not_started: str = ""

    def build(
        self,
        database: Database,
        clock: Stopwatch,
        watch: Observer,
        found: SearchResult,
        settings: Settings,
        deadline: Deadline,
    ) -> BuiltPlan:
        """Select, build, and check against float64 and the clock."""
        net = self.net
        choice = select(net, found, settings, deadline)
        planned = make_plan(net, choice, settings, found=found)
        tuned_s = clock.seconds
        watch("checking the whole net", 0, 0)
        with builds_of(planned, net, settings) as ahead:
            with cores_shared(ahead.begun, net.target):
                check = self.check()
            seen = [line for line in (self.not_started, check.wrong, check.note) if line]
            notes = [*seen, *prediction_notes(found), *ceiling_notes(self.ceilings), *database.warnings]
            planned = dataclasses.replace(planned, notes=(*planned.notes, *notes))
            plan, program, outcome = build_and_check(
                check,
                lambda: build_fastest(planned, net, settings, choice.problem, deadline=deadline, ahead=ahead),
                lambda plan: build_program(plan, net.captured, net.regions_by_nodes, net.target, settings, tuned=True),
                lambda: end_to_end.TimingLimits.of(settings.effort, deadline),
            )
        least = least_error(str(settings.numerics), net.captured.graph)
        wrong = end_to_end.why_wrong("the outputs'", outcome.errors, outcome.baseline_errors, least)
        built = BuiltPlan(choice, plan, program, outcome, wrong, tuned_s)
        limits = partial(end_to_end.TimingLimits.of, settings.effort, deadline)
        if others := fusing_rivals(net, found, built, settings):
            watch("timing other selections", 0, 0)
            built = fastest_of(built, others, check, net, settings, limits, contest=FUSING)
        rivals = rivals_of(net, found, built, settings)
        if not rivals:
            return built
        watch("timing the net as one program", 0, 0)
        return fastest_of(built, rivals, check, net, settings, limits)

    def conclude(self, tuned: TunedPlan, deadline: Deadline) -> OptimizeResult:
        """The result: the program, or the baseline if the program is not faster (`end_to_end.falls_back`)."""
        net, settings, built = self.net, self.settings, tuned.built
        plan, program, outcome = built.plan, built.program, built.outcome
        slow = end_to_end.why_slow("the whole net", outcome.optimized, outcome.baseline)
        stock_wrong = bool(self.check().wrong or stock_defects(net))
        falls_back, note = end_to_end.falls_back(
            slow, built.wrong, net.captured.as_pytorch, net.target.device, settings, stock_wrong
        )
        if note:
            plan = dataclasses.replace(plan, notes=(*plan.notes, note))
            program = program.with_plan(plan)
        if falls_back:
            plan = plan.as_baseline()
            program = Program(plan, net.captured, None)
            outcome = dataclasses.replace(outcome, optimized=outcome.baseline, errors=outcome.baseline_errors)
        inputs = net.captured.flatten_inputs(self.isolated.args, self.isolated.kwargs)
        program, timeline = with_timeline(program, inputs, settings.effort, deadline, outcome.optimized.median_ms / 1e3)
        plan = program.plan
        with phase("summary"), collection_paused():
            return self._result(tuned, plan, program, outcome, timeline)

    def _result(
        self,
        tuned: TunedPlan,
        plan: Plan,
        program: Program,
        outcome: CheckOutcome,
        timeline: list[Span],
    ) -> OptimizeResult:
        net, settings = self.net, self.settings
        module = OptimizedModule(self.model, program, *self.given, self.tuner, settings.check)
        summary = summarize(
            net, tuned.found, tuned.built.choice, plan, program, outcome, settings, tuned.built.tuned_s, timeline,
            ceilings=self.ceilings,
        )  # fmt: skip
        told = (self.check().wrong,) if self.check().wrong else ()
        choice = tuned.built.choice
        found = SummaryOnDemand(summary, choice, plan, net, settings) if choice.left_out else summary
        return OptimizeResult(module, plan, found, told, measured=summary.tuning.measured)
