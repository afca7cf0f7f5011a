"""TrainingStep: loss, gradients and update of one batch in one call, by a tuned program where one fits the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convoy import plan as plans
from convoy.capture import TrainingCapture
from convoy.capture.batch import FlatBatch, flatten_batch
from convoy.capture.joint import python_reads_of
from convoy.capture.loss_module import LossModule
from convoy.capture.step_tensors import StepTensors
from convoy.engines.group_norm_backward import guarded
from convoy.errors import InputError
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.eager import EagerProgram
from convoy.program.module_state import ModuleState
from convoy.program.recording import CAPTURE_FAILURES, first_line
from convoy.training.autograd_step import AutogradStep
from convoy.training.bucket_completion import all_written
from convoy.training.capturable_optimizers import has_state, why_not_capturable
from convoy.training.capture_guard import CaptureGuard
from convoy.training.gradient_allreduce import has_hooks, put_gradients
from convoy.training.overlapped_allreduce import OverlappedAllReduce
from convoy.training.overlapped_updates import (
    OverlappedUpdates,
    ReadAfterUpdateError,
    early_update_pays,
    make_overlapped_updates,
)
from convoy.training.process_group_shutdown import release_before_shutdown
from convoy.training.step_graph import StepFunction, StepGraph
from convoy.training.step_program import StepOptions, StepProgram
from convoy.training.step_serialization import copy_step, reduce_step
from convoy.training.step_update import StepUpdate
from convoy.user_warning import warn_user


class TrainingStep:
    """A whole training step: `loss = step(x, y)`.

    Parameters, buffers, gradients and optimizer state stay the model's and the optimizer's own tensors, so `state_dict`,
    checkpoints, learning-rate schedules and hooks on parameters work as always. A batch of another shape, and a model that
    was changed (docs/concepts/stale-weights.md), run as stock PyTorch would run them, with one warning. Tensors that the loss
    holds, such as class weights in a closure, are read anew in every step.

    On a GPU the step becomes one CUDA graph as soon as the optimizer has its state, mostly with the second call, the update
    included; where gradients are accumulated, one graph each for the first, the middle and the last call. `notes` says why
    where it does not.

    Args:
        model: the module, without a DistributedDataParallel around it.
        loss_fn: (output, *targets) → one number.
        optimizer: any that needs no closure.
        options: autocast, scaler, clipping, accumulation, process group.
        program: made by `convoy.training_step`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        options: StepOptions,
        program: StepProgram,
    ) -> None:
        self.model, self.loss_fn, self.optimizer, self.options = model, loss_fn, optimizer, options
        self.program = program
        self.notes: list[str] = list(program.plan.notes)
        self._stock = LossModule(model, loss_fn, options.amp, scaled=options.scaler is not None)
        self._lifted = program.capture.lifted if program.capture else ()
        self._read_by_code = python_reads_of(self._stock)
        found = self._read_by_code.modules  # such as a frozen net in the loss
        watched = nn.ModuleList([self._stock, *found]) if found else self._stock
        self._state = ModuleState(watched, learned=self._stock, inputs=self._lifted)
        self._guard = self._guard_now()
        self._tensors = self._tensors_now()
        self._warned: set[str] = set()
        self._micro = 0
        self._graph: StepGraph | None = None
        self._graph_refused = False
        self._warm = False  # whether a whole update was made launch by launch
        self._update = StepUpdate(optimizer, options, self._guard.device)
        self._overlap = self._make_overlap()

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingStep:
        """A step with a model, a loss and an optimizer of its own. A process group is shared."""
        return copy_step(self, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A pickle holds model, loss, optimizer, options and the plan; see `convoy.training.step_serialization`."""
        return reduce_step(self)

    def follow(self, step: TrainingStep) -> None:
        """Take over what a step knows of its model, as its copy."""
        self._state.outdate(step._state.change())

    @property
    def plan(self) -> Plan:
        """What runs."""
        return self.program.plan

    def explain(self, layer: str | None = None) -> str:
        """The plan in words: every step's engine, layout and time, or all that is known of one layer."""
        return plans.explain(self.plan, layer)

    def save(self, path: str | Path) -> Path:
        """Write the plan."""
        plans.save(self.plan, Path(path))
        return Path(path)

    @property
    def group(self) -> Any:
        """The process group over which gradients are averaged, or None."""
        return self.options.group

    def release(self) -> None:
        """Let go of the captured graph and of its memory; the next call captures anew. Gradients stay."""
        if self._graph is not None:
            self._graph.release()
            self._graph = None

    def __call__(self, x: Any, *targets: Any) -> torch.Tensor:
        """Train on a batch.

        Args:
            x: the model's input, or a tuple of its inputs.
            targets: what the loss takes behind the model's output.

        Returns:
            The loss, a tensor without gradient that later calls leave alone.
        """
        last = self._micro + 1 == self.options.accumulate
        batch = (x, *targets)
        flat = flatten_batch(batch)
        check_not_empty(flat)
        reason = self._why_stock(flat)
        if reason:
            if self.program.runnable is not None:  # else PyTorch's step runs in any case
                self._warn_once(reason)
            loss = self._run_stock(batch, update=last)
        elif self._wants_graph():
            loss = self._run_graph(batch)
        else:
            loss = self._launch(batch, first=self._micro == 0, last=last)
            self._warm |= last
        self._micro = 0 if last else self._micro + 1
        return loss

    # --- the step itself ------------------------------------------------------------------------------------------------

    def _launch(self, batch: tuple[Any, ...], *, first: bool, last: bool) -> torch.Tensor:
        """One micro-batch kernel by kernel."""
        plain = self.program.capture is None or self._guard.device.type != "cuda"
        if self.program.runnable is None:
            if plain or has_hooks(self._parameters()):
                return self._run_stock(batch, update=last)
            self._forget_gradients(first=first)
            return self._stock_work(batch)(self._leaves(batch), first=first, last=last)
        self._forget_gradients(first=first)
        with torch.no_grad():
            return self._work(self._leaves(batch), first=first, last=last)

    def _forget_gradients(self, *, first: bool) -> None:
        """As `zero_grad` does: gradients of parameters that this step gives none, which the optimizer would take for new."""
        if not first:
            return
        made = {id(parameter) for parameter in self._learned()} if self.program.runnable is not None else set()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in made:
                    parameter.grad = None

    def _stock_work(self, batch: tuple[Any, ...]) -> AutogradStep:
        """PyTorch's step on a batch's tensors."""
        rebuild = flatten_batch(self.options.given(batch)).rebuild
        return AutogradStep(self._stock, rebuild, self._learning(), self.options.accumulate, self._update)

    def _work(
        self, batch: Sequence[torch.Tensor], *, first: bool, last: bool, updates: OverlappedUpdates | None = None
    ) -> torch.Tensor:
        """Everything, on torch's current stream; without gradient mode. What a CUDA graph captures."""
        runnable, capture = self.program.runnable, self._capture_of()
        assert runnable is not None
        parameters, buffers = self._tensors.parameters, self._tensors.buffers
        inputs = [*(parameters[n].detach() for n in capture.parameters), *(buffers[n] for n in capture.buffers), *batch]
        overlap = None if has_hooks(self._parameters()) else self._overlap
        loss, *made = runnable(inputs, updates or overlap)
        gradients, statistics = made[: len(capture.learned)], made[len(capture.learned) :]
        if statistics:
            torch._foreach_copy_([buffers[name] for name in capture.updated], statistics)
        if capture.counted:
            torch._foreach_add_([buffers[name] for name in capture.counted], 1)
        if self.options.accumulate > 1:
            torch._foreach_mul_(gradients, 1 / self.options.accumulate)
        learned = self._learned()
        put_gradients(learned, gradients, add=not first)
        if last and updates is None:
            self._update(learned, averaged=overlap is not None)
        return loss

    def _make_overlap(self) -> OverlappedAllReduce | None:
        """What averages gradients while the backward pass goes on; None where they are averaged when all are there.

        Accumulated gradients are complete only with the last micro-batch's, and hooks are for a process's own gradients.
        """
        runnable = self.program.runnable
        wanted = self.options.overlap and self.options.accumulate == 1
        if self._update.averages is None or runnable is None or not wanted:
            return None
        count = len(self._capture_of().learned)
        if not all_written(runnable.bound, count):
            return None
        return OverlappedAllReduce(runnable.bound, count, self._update.averages)

    def _leaves(self, batch: tuple[Any, ...]) -> list[torch.Tensor]:
        return flatten_batch(self.options.given(batch)).tensors

    def _run_stock(self, batch: tuple[Any, ...], *, update: bool) -> torch.Tensor:
        """The same step by PyTorch's autograd, hooks and all."""
        learning: list[nn.Parameter] = [p for p in (*self._stock.parameters(), *self._lifted) if p.requires_grad]  # type: ignore[misc]
        if self._micro == 0:
            self.optimizer.zero_grad(set_to_none=True)
            for parameter in learning:
                parameter.grad = None
        with torch.enable_grad():
            made = self._stock(*self.options.given(batch))
            graph = self.program.capture.captured.as_pytorch if self.program.capture else None
            with guarded(graph, made[0].device.type):
                (made[0] / self.options.accumulate).backward()
        if update:
            with torch.no_grad():
                self._update(learning)
        return made[-1].detach()

    # --- one CUDA graph -------------------------------------------------------------------------------------------------

    def _wants_graph(self) -> bool:
        """Whether this call is to be replayed: on a GPU, where nothing speaks against it, once the optimizer has its state."""
        if self._graph_refused or self.program.capture is None or self._guard.device.type != "cuda":
            return False
        reason = why_not_capturable(self.optimizer, scaled=self._update.scaler is not None)
        if has_hooks(self._parameters()):
            reason = "a parameter has hooks, which Python must call"
        if reason:
            self._graph_refused = True
            self.notes.append(f"the step is launched kernel by kernel, not as one CUDA graph: {reason}")
            return False
        # An update that has begun is ended as it was begun: its gradients lie where they were made. And what libraries do in
        # their first call cannot be captured.
        ready = self._warm and self._micro == 0
        return self._graph is not None or (ready and has_state(self.optimizer, self._learned()))

    def _run_graph(self, batch: tuple[Any, ...]) -> torch.Tensor:
        leaves = self._leaves(batch)
        if self._graph is None:
            try:
                self._graph = self._capture(leaves, batch)
            except CAPTURE_FAILURES as error:
                self._graph_refused = True
                words = first_line(error)
                self._warn_once(
                    f"the step could not be captured as a CUDA graph and is launched kernel by kernel: {words}"
                )
                self.notes.append(f"the step could not be captured as a CUDA graph: {words}")
                return self._launch(batch, first=True, last=self.options.accumulate == 1)
        return self._graph(leaves, self._micro)

    def _capture(self, leaves: Sequence[torch.Tensor], batch: tuple[Any, ...]) -> StepGraph:
        runnable = self.program.runnable
        if runnable is None:
            made = self._record(self._stock_work(batch), leaves)
        else:
            made = self._capture_program(runnable, leaves)
        if self.group is not None:
            release_before_shutdown(self)
        self._guard = self._guard_now(self.optimizer)
        return made

    def _capture_program(self, runnable: EagerProgram, leaves: Sequence[torch.Tensor]) -> StepGraph:
        updates = self._updates_of(runnable)
        streams, keeps = runnable.streams, runnable.workspace()
        if updates is not None:
            beside = () if updates.stream is None else (updates.stream,)
            try:
                return self._record(partial(self._work, updates=updates), leaves, (*streams, *beside), keeps)
            except ReadAfterUpdateError:
                pass
        return self._record(self._work, leaves, streams, keeps)

    def _record(
        self,
        work: StepFunction,
        leaves: Sequence[torch.Tensor],
        streams: Sequence[torch.cuda.Stream] = (),
        keeps: object = None,
    ) -> StepGraph:
        return StepGraph(
            work,
            leaves,
            self._parameters(),
            self.optimizer,
            scaler=self._update.scaler,
            micro=self.options.accumulate,
            streams=(*streams, *self._update.streams),
            keeps=keeps,
        )

    def _updates_of(self, runnable: EagerProgram) -> OverlappedUpdates | None:
        """What updates parameters while the backward pass goes on; None where an update wants all gradients."""
        options, capture = self.options, self._capture_of()
        together = (options.scaler, options.clip_grad_norm) != (None, None)
        late = self._update.averages is not None and self._overlap is None
        learned = self._learned()
        wanted = options.early_updates
        wanted = early_update_pays(learned, self.plan.total_us) if wanted is None else wanted
        if together or late or options.accumulate > 1 or not wanted:
            return None
        slots = [capture.parameters.index(name) for name in capture.learned]
        taken = (*runnable.streams, *self._update.streams)
        return make_overlapped_updates(runnable.bound, learned, slots, self.optimizer, taken, self._overlap)

    # --- the step's tensors ---------------------------------------------------------------------------------------------

    def _capture_of(self) -> TrainingCapture:
        """What was captured."""
        assert self.program.capture is not None
        return self.program.capture

    def _tensors_now(self) -> StepTensors:
        """The tensors that the model and its loss hold at present."""
        return StepTensors(self._stock, self._lifted)

    def _guard_now(self, optimizer: torch.optim.Optimizer | None = None) -> CaptureGuard:
        """What says when the addresses that the step uses are no longer those of this moment."""
        return CaptureGuard(self._stock, optimizer, self._lifted)

    def _learned(self) -> list[nn.Parameter]:
        """The parameters that the captured step gives gradients."""
        return [self._tensors.parameters[name] for name in self._capture_of().learned]  # type: ignore[misc]

    def _learning(self) -> list[nn.Parameter]:
        """The parameters that require a gradient."""
        return list(self._tensors.learning.values())

    def _parameters(self) -> list[nn.Parameter]:
        return list(self._tensors.parameters.values())  # type: ignore[arg-type]

    # --- when stock PyTorch runs ----------------------------------------------------------------------------------------

    def _why_stock(self, batch: FlatBatch) -> str | None:
        """Why PyTorch's autograd must run in place of what was made for the step; None where it need not."""
        if self.program.capture is None:
            return "the step was not captured"
        if batch.signature != self.program.signature:
            return "no plan for this batch's shapes, dtypes or other values: the stock step runs"
        if any(tensor.requires_grad for tensor in batch.tensors):
            return "a tensor of the batch requires a gradient: the stock step runs"
        if effective_amp(self.options.amp, self._guard.device) != self.program.amp:
            return "autocast is not as it was when the step was made: the stock step runs; pass `amp` to training_step"
        reason = calls.why_not_plain(batch.tensors) or calls.why_modes_forbid()
        if reason is not None:
            return f"{reason}: the stock step runs"
        change = self._state.change()
        if change is not None:
            return f"{change} after capture: the stock step runs; call convoy.training_step anew"
        changed = self._read_by_code.changed()
        if changed:
            return f"{changed!r}, which the loss reads, was changed after capture: the stock step runs; pass it as a tensor"
        if self._guard.is_invalid():
            self._guard = self._guard_now()
            self._tensors = self._tensors_now()
            self._graph = None
        return None

    def _warn_once(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warn_user(reason)


def check_not_empty(batch: FlatBatch) -> None:
    """Refuse a batch without images: a mean over none of them is not a number, and so would be the weights. Targets may be empty.

    Raises:
        InputError: the batch has no tensor, or its first one has no first side or one of 0.
    """
    if not batch.tensors:
        raise InputError("batch", "no tensor", "at least one tensor", "Pass (x, *targets).")
    first = batch.tensors[0]
    if not first.is_nested and 0 in first.shape[:1]:
        raise InputError(
            "batch", f"a tensor of shape {list(first.shape)}", "at least one image", "Leave the batch out."
        )


def effective_amp(amp: torch.dtype | None, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast that a step runs under: its own, else that of a region around the call; None without."""
    if amp is not None:
        return amp
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
