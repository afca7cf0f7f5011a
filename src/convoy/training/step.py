"""TrainingStep: loss, gradients and update of one batch in one call, by a tuned program if one fits the batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convoy import plan as plans
from convoy.capture.batch import FlatBatch, flatten_batch
from convoy.capture.joint import python_reads_of
from convoy.capture.loss_module import LossModule
from convoy.errors import InputError
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.cuda.recording import CAPTURE_FAILURES, first_line
from convoy.program.state.module_state import ModuleState
from convoy.training.batch_form import BatchForms
from convoy.training.capturable_optimizers import has_state
from convoy.training.capture_guard import CaptureGuard
from convoy.training.factored_run import StepAgreement
from convoy.training.process_group_shutdown import release_before_shutdown
from convoy.training.step_capture import capture_step, why_no_graph
from convoy.training.step_graph import StepGraph
from convoy.training.step_program import StepOptions, StepProgram
from convoy.training.step_serialization import SavedStep, bound_again, saved_step
from convoy.training.step_work import StepWork
from convoy.user_warning import warn_user


class TrainingStep:
    """A whole training step: `loss = step(x, y)`.

    Parameters, buffers, gradients and optimizer state are the model's and the optimizer's own tensors, so `state_dict`,
    checkpoints, learning-rate schedules and hooks on parameters work as usual. For a batch of another shape, or if the model
    was changed (docs/concepts/stale-weights.md), PyTorch's own step runs, with one warning. Tensors that the loss holds, such
    as class weights in a closure, are read in every step.

    On a GPU the step, update included, is captured as one CUDA graph once the optimizer has its state, mostly in the second
    call. If gradients are accumulated, the first, the middle and the last call have a graph each. `notes` says why if there is
    no graph.

    Args:
        model: the module, without a DistributedDataParallel around it.
        loss_fn: (output, *targets) → one number.
        optimizer: any optimizer that needs no closure.
        options: autocast, scaler, clipping, accumulation, process group.
        program: the tuned program, from `convoy.training_step`.

    Attributes:
        notes: the plan's notes, and why the step is no CUDA graph if it is none.
        work: computes micro-batches launch by launch.
        guard: detects that the captured graph is stale.
        graph: the captured step; None if there is none yet.
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
        self.notes: list[str] = list(program.plan.notes)
        self._stock = LossModule(model, loss_fn, options.amp, scaled=options.scaler is not None)
        self._lifted = program.capture.lifted if program.capture else ()
        self._python_reads = python_reads_of(self._stock)
        found = self._python_reads.modules  # such as a frozen net in the loss
        watched = nn.ModuleList([self._stock, *found]) if found else self._stock
        self._state = ModuleState(watched, learned=self._stock, inputs=self._lifted)
        self.guard = self._guard_now()
        self.work = StepWork(self._stock, optimizer, options, program, self.guard.device)
        self._agreement = None if self.work.factored is None else StepAgreement(options.group)
        self.graph: StepGraph | None = None
        self._graph_refused = False
        self._warned: set[str] = set()
        self._forms = BatchForms(model, loss_fn, program.form)
        self._micro = 0
        self._warm = False  # whether a whole update was made launch by launch

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingStep:
        """A step with a model, a loss and an optimizer of its own. A process group and the programs are shared."""
        model = copy.deepcopy(self.model, memo)
        loss_fn = copy.deepcopy(self.loss_fn, memo)
        optimizer = copy.deepcopy(self.optimizer, memo)
        options = dataclasses.replace(self.options, scaler=copy.deepcopy(self.options.scaler, memo))
        program, capture = self.program, self.program.capture
        if capture is not None:  # tensors that the model's own code holds were copied with it
            lifted = tuple(memo.get(id(tensor), tensor) for tensor in capture.lifted)
            program = dataclasses.replace(program, capture=dataclasses.replace(capture, lifted=lifted))
        made = type(self)(model, loss_fn, optimizer, options, program)
        memo[id(self)] = made
        made._state.outdate(self._state.change())
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A pickle holds model, loss, optimizer, options and the plan; see `convoy.training.step_serialization`."""
        saved = saved_step(self.program, self.group)
        return restore_step, (type(self), self.model, self.loss_fn, self.optimizer, self.options, saved)

    @property
    def program(self) -> StepProgram:
        """The tuned program."""
        return self.work.program

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self.program.plan

    def explain(self, layer: str | None = None) -> str:
        """The plan in words: engine, layout and time of every step, or all that is known of one layer."""
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
        """Destroy the captured graph and free its memory; the next call captures again. Gradients stay."""
        if self.graph is not None:
            self.graph.release()
            self.graph = None

    def __call__(self, x: Any, *targets: Any, **named: Any) -> torch.Tensor:
        """Train on a batch.

        Args:
            x: the model's input, a tuple of its inputs, or a dictionary of them by the names of the parameters of its forward.
            targets: the further arguments of the loss.
            named: likewise, by the names of the loss function's parameters.

        Returns:
            The loss, a tensor without gradient that later calls do not change.
        """
        first, last = self._micro == 0, self._micro + 1 == self.options.accumulate
        batch = (self._forms.inputs(x), *(self._forms.targets(targets, named) if named else targets))
        flat = flatten_batch(batch)
        check_not_empty(flat)
        reason = self._why_stock(flat)
        factors = self._gathers_factors(possible=reason is None)
        if reason:
            if self.program.runnable is not None:  # else PyTorch's step runs anyway
                self._warn_once(reason)
            loss = self.work.run_stock(batch, first=first, last=last)
        elif factors is not False and self._uses_graph():
            loss = self._run_graph(batch)
        else:
            loss = self.work.launch(batch, first=first, last=last, factors=factors is True)
            self._warm |= last
        self._micro = 0 if last else self._micro + 1
        return loss

    def _gathers_factors(self, *, possible: bool) -> bool | None:
        """Whether all processes gather factors in this call; None where no step of this kind does."""
        if self._agreement is None or self.work.factored is None:
            return None
        return self._agreement.all_can(possible and self.work.can_gather_factors())

    # --- one CUDA graph -------------------------------------------------------------------------------------------------

    def _uses_graph(self) -> bool:
        """Whether this call replays a CUDA graph: on a GPU, if the step can be captured and the optimizer has its state."""
        if self._graph_refused or self.program.capture is None or self.guard.device.type != "cuda":
            return False
        reason = why_no_graph(self.work)
        if reason:
            self._graph_refused = True
            self.notes.append(f"the step is launched kernel by kernel, not as one CUDA graph: {reason}")
            return False
        # An accumulation that began without a graph also ends without one, because its gradients lie in other memory. And the
        # first calls of libraries cannot be captured.
        ready = self._warm and self._micro == 0
        return self.graph is not None or (ready and has_state(self.optimizer, self.work.learned()))

    def _run_graph(self, batch: tuple[Any, ...]) -> torch.Tensor:
        leaves = self.work.leaves(batch)
        if self.graph is None:
            try:
                self.graph = capture_step(self.work, batch, leaves)
            except CAPTURE_FAILURES as error:
                self._graph_refused = True
                words = first_line(error)
                self._warn_once(
                    f"the step could not be captured as a CUDA graph and is launched kernel by kernel: {words}"
                )
                self.notes.append(f"the step could not be captured as a CUDA graph: {words}")
                return self.work.launch(batch, first=True, last=self.options.accumulate == 1)
            if self.group is not None:
                release_before_shutdown(self)
            self.guard = self._guard_now(self.optimizer)
        return self.graph(leaves, self._micro)

    def _guard_now(self, optimizer: torch.optim.Optimizer | None = None) -> CaptureGuard:
        """A guard that compares with the step's present tensors and optimizer state."""
        return CaptureGuard(self._stock, optimizer, self._lifted)

    # --- when stock PyTorch runs ----------------------------------------------------------------------------------------

    def _why_stock(self, batch: FlatBatch) -> str | None:
        """Why PyTorch's own step must run; None if it need not."""
        if self.program.capture is None:
            return "the step was not captured"
        if batch.signature != self.program.signature:
            return (
                "no plan for this batch's shapes, dtypes or other values: the stock step runs; give all batches one shape "
                "(`drop_last=True`), and pass numbers that change as tensors"
            )
        if any(tensor.requires_grad for tensor in batch.tensors):
            return "a tensor of the batch requires a gradient: the stock step runs; call .detach() on it"
        if effective_amp(self.options.amp, self.guard.device) != self.program.amp:
            return "autocast is not as it was when the step was made: the stock step runs; pass `amp` to training_step"
        reason = calls.why_not_plain(batch.tensors) or calls.why_modes_forbid() or self._why_flags_forbid()
        if reason is not None:
            return f"{reason}: the stock step runs"
        change = self._state.change()
        if change is not None:
            return f"{change} after capture: the stock step runs; call convoy.training_step again"
        changed = self._python_reads.changed()
        if changed:
            reason = f"{changed!r}, which the model or its loss reads, was changed after capture"
            return f"{reason}: the stock step runs; pass it as a tensor"
        if self.guard.is_invalid():
            self.guard = self._guard_now()
            self.work.renew()
            self.graph = None
        return None

    def _why_flags_forbid(self) -> str | None:
        """Why PyTorch's process-wide flags ask for its own step; None if they do not."""
        if torch.is_anomaly_enabled():  # it names the operator of the forward pass whose gradient is NaN
            return "anomaly detection is on"
        now, then = torch.get_default_dtype(), self.program.default_dtype
        return None if now == then else f"the default dtype is {now} and was {then} when the step was made"

    def _warn_once(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warn_user(reason)


def restore_step(
    kind: type[TrainingStep], model: nn.Module, loss_fn: Any, optimizer: Any, options: StepOptions, saved: SavedStep
) -> TrainingStep:
    """The step of a pickle; PyTorch's own step, with one warning, if its plan cannot be bound."""
    made, program = bound_again(saved, model, loss_fn, optimizer, options)
    return kind(model, loss_fn, optimizer, options, program) if made is None else made


def check_not_empty(batch: FlatBatch) -> None:
    """Raise InputError for a batch without images: its mean loss would be NaN, and so would the weights. Targets may be empty.

    Raises:
        InputError: the batch has no tensor, or its first tensor has no images.
    """
    if not batch.tensors:
        raise InputError("batch", "no tensor", "at least one tensor", "Pass (x, *targets).")
    first = batch.tensors[0]
    if not first.is_nested and 0 in first.shape[:1]:
        raise InputError(
            "batch", f"a tensor of shape {list(first.shape)}", "at least one image", "Leave the batch out."
        )


def effective_amp(amp: torch.dtype | None, device: torch.device) -> torch.dtype | None:
    """The autocast dtype of a step: its own, else that of a region around the call; None without autocast."""
    if amp is not None:
        return amp
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
