"""training_step: from a model, its loss and its optimizer to a step that computes the same sooner, or to the stock one."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy import plan as plans
from convoy.capture import TrainingCapture, capture_training
from convoy.errors import InputError, PlanError
from convoy.graph.text import digest
from convoy.measurement import SearchResult, protocol_for
from convoy.measurement.room import memory_limited
from convoy.perfdb import Database
from convoy.pipeline import verdict
from convoy.pipeline.agreement import agree
from convoy.pipeline.check import checked, timeline_of
from convoy.pipeline.choice import make_plan, select
from convoy.pipeline.offers import distinct_problems
from convoy.pipeline.proof import Built, proven
from convoy.pipeline.schedules import build_fastest
from convoy.pipeline.stages import (
    Net,
    Observer,
    Stopwatch,
    check_target,
    device_of,
    input_formats,
    make_net,
    measure,
    memory_format,
    prediction_notes,
    silent,
    target_for,
)
from convoy.pipeline.stock_step import StepCheck, StockStep
from convoy.pipeline.summarize import summarize
from convoy.plan import Plan
from convoy.problem import texts_of
from convoy.program import Program, build_program
from convoy.program.module import eager_of, signature_of
from convoy.program.step import TrainingStep
from convoy.program.step_program import StepOptions, StepProgram
from convoy.report.summary import Summary
from convoy.schedule import Collective, collectives
from convoy.settings import Effort, Settings
from convoy.target import Target

SHARED_DEVICES: Final = ("cuda",)
"""Devices of which each process has its own, so that processes measure in shares; on a CPU they would do so on the same cores."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What `train_model` found.

    Attributes:
        step: the step to call.
        plan: what it runs.
        summary: everything that was found out; None where a plan was replayed.
    """

    step: TrainingStep
    plan: Plan
    summary: Summary | None


def training_step(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    *,
    amp: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    plan: str | Path | None = None,
    settings: Settings | None = None,
    name: str = "",
) -> TrainingStep:
    """Make a function that trains a model on a batch: forward pass, loss, backward pass and update in one call.

    The gradients are those of PyTorch up to rounding; the update is the optimizer's own. On a GPU the whole step becomes one
    CUDA graph.

    Args:
        model: any module, or one inside DistributedDataParallel: then gradients are averaged over its process group, and all
            processes run one plan. Parameters stay its own; its training flags are those of this moment.
        loss_fn: (output, *targets) → one number, such as `torch.nn.functional.cross_entropy`.
        optimizer: over the model's parameters; one that needs no closure.
        batch: an example, (x, *targets); x may be a tuple. Its shapes, dtypes and memory format are tuned for.
        amp: run under autocast with this dtype (bf16 or fp16).
        scaler: a `torch.amp.GradScaler`, for fp16.
        clip_grad_norm: scale gradients down to this joint L2 norm before the update.
        accumulate: calls to an update; each adds its gradients divided by this number.
        plan: replay this saved plan and measure nothing.
        settings: what may be done; `Settings()` by default.
        name: what to call the model in plans and reports.

    Returns:
        `step`, called as `loss = step(x, y)`; with `plan`, `notes`, `explain()`, `save(path)` and `release()`.

    Raises:
        InputError: arguments that cannot be used.
        CaptureError: the model or its loss cannot be traced.
        PlanError: `plan` is of another model, shape or machine.
        SelectionError: nothing satisfies the settings: with `deterministic`, an operator that nothing computes with the same bits
            in every run, or gradients that are wrong as planned where PyTorch's own may differ from run to run.
    """
    return train_model(
        model,
        loss_fn,
        optimizer,
        batch,
        options=StepOptions(amp, scaler, clip_grad_norm, accumulate),
        plan=plan,
        settings=settings or Settings(),
        name=name,
    ).step


def train_model(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    *,
    options: StepOptions | None = None,
    plan: str | Path | None = None,
    settings: Settings,
    name: str = "",
    observer: Observer | None = None,
) -> TrainingResult:
    """`training_step`, with everything that was found out; `observer` is told of the progress."""
    options = options or StepOptions()
    _check_arguments(model, batch, options)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):  # tuning draws numbers, which training must not notice
        return _train_model(model, loss_fn, optimizer, batch, options, plan, settings, name, observer)


def _train_model(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    options: StepOptions,
    plan: str | Path | None,
    settings: Settings,
    name: str,
    observer: Observer | None,
) -> TrainingResult:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        options = dataclasses.replace(options, group=model.process_group)
        model = model.module
    replayed = plans.load(Path(plan)) if plan is not None else None
    job = _Job(model, loss_fn, optimizer, batch, options, settings, name or type(model).__name__, replayed)
    if options.group is not None and replayed is None:
        found: list[TrainingResult] = []

        def tune(shares: list[bytes]) -> Plan:
            job.take(shares)
            found.append(job.tune(observer))
            return found[0].plan

        shared = job.target.device in SHARED_DEVICES and settings.effort is not Effort.NONE
        measure_share = partial(job.measure_share, observer or silent)
        agreed = agree(tune, options.group, job.target, measure_share if shared else None)
        return found[0] if found else job.replay(agreed)
    return job.tune(observer) if replayed is None else job.replay(replayed)


def _check_arguments(model: nn.Module, batch: tuple[Any, ...], options: StepOptions) -> None:
    if not isinstance(batch, tuple) or len(batch) < 1:
        raise InputError("batch", type(batch).__name__, "a tuple (x, *targets)")
    if options.accumulate < 1:
        raise InputError("accumulate", options.accumulate, "an integer of at least 1")
    if options.clip_grad_norm is not None and not options.clip_grad_norm > 0:
        raise InputError("clip_grad_norm", options.clip_grad_norm, "a positive number, or None")
    if options.amp not in (None, torch.float16, torch.bfloat16):
        raise InputError("amp", options.amp, "torch.bfloat16, torch.float16 or None")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model", type(model).__name__, "a model with a parameter that requires a gradient")


class _Job:
    """One model with its batch on the way through the stages."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        batch: tuple[Any, ...],
        options: StepOptions,
        settings: Settings,
        name: str,
        replayed: Plan | None,
    ) -> None:
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.batch, self.options, self.settings = batch, options, settings
        self.target: Target = target_for(device_of(model, batch, {}))
        scaled = options.scaler is not None
        self.given = options.given(batch)
        self.capture: TrainingCapture = capture_training(model, loss_fn, self.given, amp=options.amp, scaled=scaled)
        self.net = self._net(name, replayed)

    def _net(self, name: str, replayed: Plan | None) -> Net:
        """The captured step; gradients have their parameters' memory format.

        Gradients that are sent together are cast together; where a plan is replayed, those that it casts together, whoever sent
        them when it was made.
        """
        capture = self.capture
        graph = capture.captured.graph
        border = input_formats(capture.captured, self.inputs())
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        returned = [*(parameters[n] for n in capture.learned), *(buffers[n] for n in capture.updated)]
        for value, tensor in zip(graph.outputs[1:], returned, strict=True):
            if tensor.dim() == 4:
                border[value] = memory_format(tensor)
        images = [value for value in graph.inputs if value.startswith("batch.")]
        first = next((border[value] for value in images if value in border), "nchw")
        sent = [one.args for one in self._collectives()] if replayed is None else plans.cast_together(replayed.steps)
        net = make_net(name, capture.captured, border, first, self.settings, self.target, sent)
        net.batch_input = images[0]
        return net

    def inputs(self) -> list[torch.Tensor]:
        """Parameters, buffers and batch, in the graph's order."""
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        held = [
            *(parameters[n].detach() for n in self.capture.parameters),
            *(buffers[n] for n in self.capture.buffers),
        ]
        return [*held, *pytree.tree_leaves(self.given)]

    def measure_share(self, observer: Observer, index: int, count: int) -> bytes:
        """Measure one of several shares; what was measured, as an export of the database."""
        protocol = protocol_for(self.settings.effort, self.target.device).id
        with Database.open(self.settings.db) as database:
            found = measure(self.net, self.settings, database, observer, (index, count))
            # As the clock gave them: in `found` are rows that these settings rule out, without their times.
            rows = [row for key in found.rows for row in database.lookup(key, self.target.digest, protocol)]
        problems = distinct_problems(self.net.regions, self.net.copies)
        texts = texts_of(p for p in problems if p.key in found.rows)
        with Database.memory() as box, tempfile.TemporaryDirectory() as folder:
            box.put(rows, texts, targets=(self.target,))
            path = Path(folder) / "share.jsonl.gz"
            box.export(path)
            return path.read_bytes()

    def take(self, shares: Sequence[bytes]) -> None:
        """Put what other processes measured into the database; every row is checked."""
        with Database.open(self.settings.db) as database, tempfile.TemporaryDirectory() as folder:
            for index, data in enumerate(shares):
                path = Path(folder) / f"{index}.jsonl.gz"
                path.write_bytes(data)
                database.import_(path)

    def tune(self, observer: Observer | None) -> TrainingResult:
        """Measure, select, build, check."""
        watch = observer or silent
        settings = self.settings
        limited = memory_limited(self.target.device, settings.tuning_memory_bytes, isolate=settings.isolate)
        with limited, Database.open(settings.db) as database:
            clock = Stopwatch()
            found = measure(self.net, settings, database, watch)
            build = partial(self._build, found, database, clock, watch)
            built = proven(build, self.net, found, settings, database, watch)
        return self._conclude(built, found)

    def _build(self, found: SearchResult, database: Database, clock: Stopwatch, watch: Observer) -> Built:
        """Select, build, check."""
        choice = select(self.net, found, self.settings)
        planned = make_plan(self.net, choice, self.settings, [*prediction_notes(found), *database.warnings])
        tuned_s = clock.seconds
        watch("checking the whole step", 0, 0)
        net, settings = self.net, self.settings
        flops = sum(region.problems[0].flops for region in net.regions if len(region.nodes) == 1)
        stock = StockStep(
            self.model, self.loss_fn, self.options.amp, self.given, scaled=self.options.scaler is not None
        )
        check = StepCheck(stock, self.inputs(), self.capture, flops=flops)
        plan, program, outcome = checked(
            check,
            lambda: build_fastest(planned, net, settings, choice.problem, self._collectives()),
            lambda found: build_program(found, net.captured, net.regions_by_nodes, net.target, settings),
        )
        plan = dataclasses.replace(plan, notes=(*plan.notes, check.note) if check.note else plan.notes)
        wrong = verdict.why_wrong("the gradients'", outcome.errors, outcome.baseline_errors, verdict.LEAST_ERROR)
        return Built(choice, plan, program, outcome, wrong, tuned_s)

    def _collectives(self) -> list[Collective]:
        """The all-reduces of the gradients, where there are several processes."""
        group = self.options.group
        if group is None or self.options.accumulate > 1:
            return []
        graph = self.capture.captured.graph
        names = graph.outputs[1 : 1 + len(self.capture.learned)]
        specs = [graph.values[name].spec for name in names]
        processes = torch.distributed.get_world_size(group)
        return collectives(names, [spec.size_bytes for spec in specs], [spec.dtype for spec in specs], processes)

    def _conclude(self, built: Built, found: SearchResult) -> TrainingResult:
        plan, program, outcome = built.plan, built.program, built.outcome
        graph, device = self.capture.captured.as_pytorch, self.target.device
        slow = verdict.why_slow("loss and gradients", outcome.optimized, outcome.baseline)
        falls_back, reason = verdict.falls_back(slow, built.wrong, graph, device, self.settings)
        plan = dataclasses.replace(plan, notes=(*plan.notes, reason) if reason else plan.notes)
        if falls_back:
            plan = dataclasses.replace(plan, baseline=True, steps=())
            program = Program(plan, self.capture.captured, None)
            outcome = dataclasses.replace(outcome, optimized=outcome.baseline, errors=outcome.baseline_errors)
        plan, timeline = timeline_of(plan, program, self.inputs())
        summary = summarize(
            self.net, found, built.choice, plan, program, outcome, self.settings, built.tuned_s, timeline
        )
        return TrainingResult(self._step(plan, program), plan, summary)

    def replay(self, plan: Plan) -> TrainingResult:
        """Bind a plan that exists already, after checking that it is for this step and target."""
        check_target(plan, self.target)
        if plan.graph_digest != digest(self.net.captured.graph):
            raise PlanError("plan", plan.model, "a plan of this model, loss and batch", "Tune it anew.")
        settings = dataclasses.replace(self.settings, numerics=plan.numerics)
        program = build_program(plan, self.net.captured, self.net.regions_by_nodes, self.target, settings)
        return TrainingResult(self._step(program.plan, program), program.plan, None)

    def _step(self, plan: Plan, program: Program) -> TrainingStep:
        # Not the captured form: the whole step is captured, with the update.
        runnable = eager_of(program.runnable) if program.runnable else None
        bound = StepProgram(plan, self.capture, runnable, signature_of(self.batch, {}))
        return TrainingStep(self.model, self.loss_fn, self.optimizer, self.options, bound)
