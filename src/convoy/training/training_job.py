"""A training step on its way through the stages: captured, measured, selected, built and checked, or replayed from a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from convoy.capture import TrainingCapture, capture_training
from convoy.capture.batch import flatten_batch
from convoy.capture.loss_module import LossModule
from convoy.capture.step_tensors import StepTensors
from convoy.deadline import Deadline
from convoy.errors import PlanError
from convoy.graph.text import digest
from convoy.measurement import BuilderServers, Peaks, begins_early
from convoy.measurement.device.memory_limit import memory_limited
from convoy.measurement.processes.threaded_builds import cores_shared
from convoy.perfdb import Database
from convoy.pipeline.ceilings import ceiling_notes, ceilings_of
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.end_to_end_check import build_and_check, with_timeline
from convoy.pipeline.check.verify_predicted import BuiltPlan
from convoy.pipeline.isolation import preserve_global_state
from convoy.pipeline.measure_net import prediction_notes
from convoy.pipeline.net import Net, input_formats, make_net, memory_format
from convoy.pipeline.observer import Observer, Stopwatch
from convoy.pipeline.plan_target import check_target, device_of, target_for, warn_of_changes
from convoy.pipeline.schedules import build_fastest, builds_of
from convoy.pipeline.select import make_plan, select, stock_defects
from convoy.pipeline.stored_plans.plan_record import PlanRecord
from convoy.pipeline.stored_plans.plan_store import plan_store
from convoy.pipeline.stored_plans.start import start_stored
from convoy.pipeline.summarize import SummaryOnDemand, brief_summary, summarize
from convoy.pipeline.tune_in_time import answers_first, tune_in_time
from convoy.plan import Plan
from convoy.problem import image_layout
from convoy.program import Program, build_program
from convoy.program.calls import CallExample
from convoy.program.runnable_program import eager_of
from convoy.schedule import Collective, cast_groups
from convoy.settings import Settings
from convoy.target import Target
from convoy.training.allreduce.gathered_factors import FACTORS
from convoy.training.allreduce.sent_gradients import collectives_of
from convoy.training.allreduce.weight_products import WeightProduct, products_apart
from convoy.training.batch_form import InputForm
from convoy.training.repeated_loss import check_repeats
from convoy.training.start_step import StepStart
from convoy.training.step import TrainingStep
from convoy.training.step_arguments import check_scalar_devices
from convoy.training.step_program import StepOptions, StepProgram
from convoy.training.stock_step import StepCheck, StockStep
from convoy.training.training_result import TrainingResult
from convoy.tune import SearchResult
from convoy.tuning_profile import phase


class TrainingJob:
    """One model with its batch on the way through the stages."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        batch: tuple[Any, ...],
        options: StepOptions,
        amp: torch.dtype | None,
        settings: Settings,
        name: str,
        replayed: Plan | None,
    ) -> None:
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.batch, self.options, self.settings = batch, options, settings
        check_scalar_devices(model, batch)
        self.target: Target = target_for(device_of(model, batch, {}))
        scaled = options.scaler is not None
        self.amp = amp
        self._kept_check: StepCheck | None = None
        self.given = options.given(batch)
        with phase("capture"):
            self.capture: TrainingCapture = capture_training(
                model, loss_fn, self.given, amp=self.amp, scaled=scaled, deterministic=settings.deterministic
            )
        with phase("capture", "repeat the step"):
            check_repeats(self._stock())
        self.tensors = StepTensors(LossModule(model, loss_fn, self.amp, scaled=scaled), self.capture.lifted)
        with phase("regions"):
            self.net = self._net(name, replayed)

    def _net(self, name: str, replayed: Plan | None) -> Net:
        """The captured step; gradients have their parameters' memory format.

        Gradients that are sent together are cast together. If a plan is replayed, those that the plan casts together.
        """
        capture = self.capture
        graph = capture.captured.graph
        border = input_formats(capture.captured, self.inputs())
        parameters, buffers = self.tensors.parameters, self.tensors.buffers
        returned = [*(parameters[n] for n in capture.learned), *(buffers[n] for n in capture.updated)]
        for value, tensor in zip(graph.outputs[1:], returned, strict=True):
            if graph.has_layout(value):
                border[value] = memory_format(tensor)
        images = graph.inputs[len(capture.parameters) + len(capture.buffers) :]
        first = image_layout(next((border[value] for value in images if value in border), "nchw"))
        sent = [one.args for one in self._collectives()] if replayed is None else cast_groups(replayed.steps)
        apart = [product.nodes for product in self._products(replayed)]
        net = make_net(
            name, capture.captured, border, first, self.settings, self.target, sent, apart,
            joined_too=replayed is not None,
        )  # fmt: skip
        return dataclasses.replace(net, batch_input=images[0])

    def _products(self, replayed: Plan | None) -> list[WeightProduct]:
        """The weight gradients that have steps of their own: that may be gathered as factors, or that a plan keeps apart."""
        graph = self.capture.captured.graph
        gradients = graph.outputs[1 : 1 + len(self.capture.learned)]
        steps = None if replayed is None else [step.nodes for step in replayed.steps]
        return products_apart(graph, gradients, steps, self.target.device, wanted=self.options.gradients == FACTORS)

    def inputs(self) -> list[torch.Tensor]:
        """Parameters, buffers and batch, in the graph's order."""
        parameters, buffers = self.tensors.parameters, self.tensors.buffers
        held = [
            *(parameters[n].detach() for n in self.capture.parameters),
            *(buffers[n] for n in self.capture.buffers),
        ]
        return [*held, *flatten_batch(self.given).tensors]

    def tune(self, watch: Observer, deadline: Deadline) -> TrainingResult:
        """Start from a stored plan; else measure, select, build, check."""
        settings = self.settings
        limited = memory_limited(self.target.device, settings.tuning_memory_bytes, isolate=settings.isolate)
        with limited, Database.open(settings.db) as database, BuilderServers() as servers:
            clock = Stopwatch()
            more: dict[str, object] = {"sent": list(map(str, self._collectives()))}
            if products := self._products(None):
                more["apart"] = [product.nodes for product in products]
            store = plan_store("training", database, self.net, settings, more)
            started = start_stored(store, self._start(clock))
            if isinstance(started, TrainingResult):
                return started
            if answers_first(settings, deadline) and begins_early(self.target, settings):
                servers.start()  # a first answer compiles a hundred kernels, and is planned in about the time of their start
            ceilings = ceilings_of(self.target, settings, deadline)
            notes = [*filter(None, [started]), *ceiling_notes(ceilings)]
            build = partial(self._build, notes, database, clock, watch, servers)
            net = dataclasses.replace(self.net, ceilings=ceilings)
            tuned = tune_in_time(net, settings, database, watch, deadline, build)
            result = self._conclude(tuned.built, tuned.found, ceilings, deadline)
            if tuned.complete:
                error = tuned.built.outcome.baseline_errors.rel_l2_error
                store.keep(result.plan, error, None if result.found is None else brief_summary(result.found))
        return result

    def _start(self, clock: Stopwatch) -> StepStart[TrainingResult]:
        """Makes the step from a stored plan."""

        def wrap(record: PlanRecord, program: Program) -> TrainingResult:
            plan = program.plan
            summary = record.summary(self.net.name, plan, clock.seconds)
            return TrainingResult(self._step(plan, program), plan, summary)

        results = 1 + len(self.capture.learned)
        check = partial(self._check, keep=False)
        return StepStart(self.net, self.settings, self._stock, self.inputs(), results, check, wrap)

    def _stock(self) -> StockStep:
        """PyTorch's step, on copies."""
        scaled = self.options.scaler is not None
        return StockStep(self.model, self.loss_fn, self.amp, self.given, scaled=scaled, capture=self.capture)

    def _build(
        self,
        known: Sequence[str],
        database: Database,
        clock: Stopwatch,
        watch: Observer,
        servers: BuilderServers,
        found: SearchResult,
        settings: Settings,
        deadline: Deadline,
    ) -> BuiltPlan:
        """Select, build, check."""
        choice = select(self.net, found, settings, deadline)
        notes = [*prediction_notes(found), *known, *database.warnings]
        planned = make_plan(self.net, choice, settings, notes, found)
        tuned_s = clock.seconds
        watch("checking the whole step", 0, 0)
        net = self.net
        with builds_of(planned, net, settings, servers) as ahead:
            with cores_shared(ahead.begun, net.target):
                check = self._check(keep=deadline.is_limited)
            plan, program, outcome = build_and_check(
                check,
                lambda: build_fastest(planned, net, settings, choice.problem, self._collectives(), deadline, ahead),
                lambda found: build_program(
                    found, net.captured, net.regions_by_nodes, net.target, settings, tuned=True
                ),
                lambda: end_to_end.TimingLimits.of(settings.effort, deadline),
            )
        plan = dataclasses.replace(plan, notes=(*plan.notes, *filter(None, (check.wrong, check.note))))
        allowed = check.allowed(outcome.errors, outcome.baseline_errors, settings.numerics)
        wrong = end_to_end.why_wrong("the gradients'", outcome.errors, allowed, end_to_end.LEAST_ERROR)
        return BuiltPlan(choice, plan, program, outcome, wrong, tuned_s, stock_wrong=bool(check.wrong))

    def _check(self, *, keep: bool) -> StepCheck:
        """The check of the step: with a float64 run, whose results stay in memory for the next plan if `keep` is set."""
        if self._kept_check is not None:
            return self._kept_check
        flops = sum(region.problems[0].flops for region in self.net.regions if len(region.nodes) == 1)
        with phase("check", "float64"):
            check = StepCheck(self._stock(), self.inputs(), self.capture, flops=flops)
        self._kept_check = check if keep else None
        return check

    def _collectives(self) -> list[Collective]:
        """The all-reduces of the gradients, where there is a process group."""
        group = self.options.group
        if group is None or self.options.accumulate > 1:
            return []
        return collectives_of(self.capture, group)

    def _conclude(
        self, built: BuiltPlan, found: SearchResult, ceilings: Peaks | None, deadline: Deadline
    ) -> TrainingResult:
        plan, program, outcome = built.plan, built.program, built.outcome
        graph, device = self.capture.captured.as_pytorch, self.target.device
        slow = end_to_end.why_slow("loss and gradients", outcome.optimized, outcome.baseline)
        stock_wrong = built.stock_wrong or bool(stock_defects(self.net))
        falls_back, reason = end_to_end.falls_back(slow, built.wrong, graph, device, self.settings, stock_wrong)
        plan = dataclasses.replace(plan, notes=(*plan.notes, reason) if reason else plan.notes)
        if falls_back:
            plan = plan.as_baseline()
            program = Program(plan, self.capture.captured, None)
            outcome = dataclasses.replace(outcome, optimized=outcome.baseline, errors=outcome.baseline_errors)
        once_s = outcome.optimized.median_ms / 1e3
        program, timeline = with_timeline(
            program.with_plan(plan), self.inputs(), self.settings.effort, deadline, once_s
        )
        plan = program.plan
        summary = summarize(
            self.net, found, built.choice, plan, program, outcome, self.settings, built.tuned_s, timeline,
            ceilings=ceilings,
        )  # fmt: skip
        choice = built.choice
        whole = SummaryOnDemand(summary, choice, plan, self.net, self.settings) if choice.left_out else summary
        return TrainingResult(self._step(plan, program), plan, whole, measured=summary.tuning.measured)

    def replay(self, plan: Plan) -> TrainingResult:
        """Bind a plan that exists already, after checking that it is for this step and target."""
        check_target(plan, self.target)
        if plan.graph_digest != digest(self.net.captured.graph):
            raise PlanError("plan", plan.model, "a plan of this model, loss and batch", "Tune it anew.")
        settings = dataclasses.replace(self.settings, numerics=plan.numerics)
        program = build_program(plan, self.net.captured, self.net.regions_by_nodes, self.target, settings)
        warn_of_changes(plan, program.plan)
        return TrainingResult(self._step(program.plan, program), program.plan, None)

    def _step(self, plan: Plan, program: Program) -> TrainingStep:
        # Not the captured form: the whole step is captured, with the update.
        runnable = eager_of(program.runnable) if program.runnable else None
        origin = _Origin(CallExample.of(self.batch, {}), self.amp, self.settings, plan.model)
        signature, form = flatten_batch(self.batch).signature, InputForm.of(self.model, self.batch[0])
        bound = StepProgram(plan, self.capture, runnable, signature, self.amp, origin, form)
        return TrainingStep(self.model, self.loss_fn, self.optimizer, self.options, bound)


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a step that was loaded from a pickle is made with: it binds the plan to the model, loss and optimizer beside it."""

    batch: CallExample
    amp: torch.dtype | None
    settings: Settings
    name: str

    def __call__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        options: StepOptions,
        plan: Plan,
    ) -> TrainingStep:
        batch, _ = self.batch.zeros()
        device = next(model.parameters()).device
        with preserve_global_state(), torch.inference_mode(False), torch.autocast(device.type, enabled=False):
            job = TrainingJob(model, loss_fn, optimizer, batch, options, self.amp, self.settings, self.name, plan)
            return job.replay(plan).step
