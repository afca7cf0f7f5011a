"""StepWork: loss, gradients and update of one micro-batch, by the tuned program or by PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from convoy.capture import TrainingCapture
from convoy.capture.batch import flatten_batch
from convoy.capture.loss_module import LossModule
from convoy.capture.step_tensors import StepTensors
from convoy.engines.group_norm_backward import guarded
from convoy.training.allreduce.bucket_completion import all_written
from convoy.training.allreduce.gradient_allreduce import has_hooks, put_gradients
from convoy.training.allreduce.overlapped_allreduce import OverlappedAllReduce
from convoy.training.autograd_step import AutogradStep
from convoy.training.factored_run import StepRun, factored_run
from convoy.training.overlapped_updates import OverlappedUpdates, early_update_pays, make_overlapped_updates
from convoy.training.step_program import StepOptions, StepProgram
from convoy.training.step_update import StepUpdate
from convoy.typed_torch import backward, foreach_add, foreach_copy, foreach_multiply


class StepWork:
    """Computes micro-batches of a training step, launch by launch. A CUDA graph of the step captures it.

    Args:
        module: model, loss and autocast.
        optimizer: any optimizer that needs no closure.
        options: autocast, scaler, clipping, accumulation, process group.
        program: the tuned program.
        device: device of the model.

    Attributes:
        tensors: parameters, buffers and lifted tensors that the step uses now.
        update: applies the gradients.
        overlap: averages gradients during the backward pass; None if they are averaged after it.
        factored: the run of the program in which factors are gathered; None if there is none.
    """

    def __init__(
        self,
        module: LossModule,
        optimizer: torch.optim.Optimizer,
        options: StepOptions,
        program: StepProgram,
        device: torch.device,
    ) -> None:
        self.module, self.optimizer, self.options, self.program, self.device = (
            module,
            optimizer,
            options,
            program,
            device,
        )
        self.lifted = program.capture.lifted if program.capture else ()
        self.tensors = StepTensors(module, self.lifted)
        self.update = StepUpdate(optimizer, options, device)
        self.overlap = self._make_overlap()
        self.factored = factored_run(program, self.update.averages, device) if self.overlap is not None else None

    def renew(self) -> None:
        """Use the tensors that the model and its loss hold now."""
        self.tensors = StepTensors(self.module, self.lifted)

    @property
    def capture(self) -> TrainingCapture:
        """The captured step; it must have been captured."""
        assert self.program.capture is not None
        return self.program.capture

    def learned(self) -> list[nn.Parameter]:
        """The parameters that the captured step gives gradients."""
        parameters = self.tensors.learning
        return [parameters[name] for name in self.capture.learned]

    def parameters(self) -> list[torch.Tensor]:
        """All parameters of the model and its loss."""
        return list(self.tensors.parameters.values())

    def leaves(self, batch: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors of a batch, and the scaler's factor, as the captured step takes them."""
        return flatten_batch(self.options.given(batch)).tensors

    def launch(self, batch: tuple[Any, ...], *, first: bool, last: bool, factors: bool = True) -> torch.Tensor:
        """Run one micro-batch kernel by kernel; gives its loss.

        Args:
            batch: (x, *targets).
            first: whether gradients are set, not added.
            last: whether the parameters are updated.
            factors: whether factors are gathered where the step can do so: every process must do the same.
        """
        if self.program.runnable is None:
            if self.program.capture is None or self.device.type != "cuda" or has_hooks(self.parameters()):
                return self.run_stock(batch, first=first, last=last)
            self._clear_other_gradients(first=first)
            return self.autograd_step(batch)(self.leaves(batch), first=first, last=last)
        self._clear_other_gradients(first=first)
        with torch.no_grad():
            return self.run(self.leaves(batch), first=first, last=last, factors=factors)

    def run_stock(self, batch: tuple[Any, ...], *, first: bool, last: bool) -> torch.Tensor:
        """Run one micro-batch by PyTorch's autograd, with all hooks; gives its loss."""
        learning = [p for p in (*self.module.parameters(), *self.lifted) if p.requires_grad]
        if first:
            self.optimizer.zero_grad(set_to_none=True)
            for parameter in learning:
                parameter.grad = None
        with torch.enable_grad():
            made = self.module(*self.options.given(batch))
            graph = self.program.capture.captured.as_pytorch if self.program.capture else None
            with guarded(graph, made[0].device.type):
                backward(made[0] / self.options.accumulate)
        if last:
            with torch.no_grad():
                self.update(learning)
        return made[-1].detach()

    def autograd_step(self, batch: tuple[Any, ...]) -> AutogradStep:
        """PyTorch's step on the tensors of a batch like this one."""
        rebuild = flatten_batch(self.options.given(batch)).rebuild
        learning = list(self.tensors.learning.values())
        return AutogradStep(self.module, rebuild, learning, self.options.accumulate, self.update)

    def run(
        self,
        batch: Sequence[torch.Tensor],
        *,
        first: bool,
        last: bool,
        updates: OverlappedUpdates | None = None,
        factors: bool = True,
    ) -> torch.Tensor:
        """Run one micro-batch by the program, on torch's current stream and without gradient mode; gives its loss.

        Args:
            batch: its tensors.
            first: whether gradients are set, not added.
            last: whether the parameters are updated.
            updates: updates parameters during the backward pass; None if they are updated after it.
            factors: as for `launch`.
        """
        chosen, capture = self._chosen(factors=factors), self.capture
        parameters, buffers = self.tensors.parameters, self.tensors.buffers
        inputs = [*(parameters[n].detach() for n in capture.parameters), *(buffers[n] for n in capture.buffers), *batch]
        overlap = None if has_hooks(self.parameters()) else chosen.overlap
        if overlap is not None:
            overlap.restart()
        loss, *made = chosen.runnable(inputs, updates or overlap)
        gradients, statistics = made[: len(capture.learned)], made[len(capture.learned) :]
        if statistics:
            foreach_copy([buffers[name] for name in capture.updated], statistics)
        if capture.counted:
            foreach_add([buffers[name] for name in capture.counted], 1)
        if self.options.accumulate > 1:
            foreach_multiply(gradients, 1 / self.options.accumulate)
        learned = self.learned()
        put_gradients(learned, gradients, add=not first)
        if last and updates is None:
            self.update(learned, averaged=overlap is not None)
        return loss

    def overlapped_updates(self) -> OverlappedUpdates | None:
        """Updates of parameters during the backward pass; None if an update needs all gradients, or does not pay."""
        chosen, options, capture = self._chosen(factors=True), self.options, self.capture
        needs_all = (options.scaler, options.clip_grad_norm) != (None, None)
        averaged_after = self.update.averages is not None and self.overlap is None
        learned = self.learned()
        wanted = options.early_updates
        wanted = early_update_pays(learned, self.program.plan.total_us) if wanted is None else wanted
        if needs_all or averaged_after or options.accumulate > 1 or not wanted:
            return None
        slots = [capture.parameters.index(name) for name in capture.learned]
        taken = (*chosen.runnable.streams, *self.update.streams)
        return make_overlapped_updates(chosen.runnable.bound, learned, slots, self.optimizer, taken, chosen.overlap)

    def can_gather_factors(self) -> bool:
        """Whether nothing in this process forbids it to gather factors now."""
        return self.factored is not None and not has_hooks(self.parameters())

    def _chosen(self, *, factors: bool) -> StepRun:
        """The program that runs, and what averages its gradients."""
        if factors and self.factored is not None:
            return self.factored
        assert self.program.runnable is not None
        return StepRun(self.program.runnable, self.overlap)

    def _clear_other_gradients(self, *, first: bool) -> None:
        """Remove the gradients of parameters that this step gives none, as `zero_grad` does: the optimizer would apply them."""
        if not first:
            return
        made = {id(parameter) for parameter in self.learned()} if self.program.runnable is not None else set[int]()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in made:
                    parameter.grad = None

    def _make_overlap(self) -> OverlappedAllReduce | None:
        """Averages gradients during the backward pass; None if they are averaged when all are computed.

        Accumulated gradients are complete only after the last micro-batch. Hooks get the gradients of their own process.
        """
        runnable = self.program.runnable
        wanted = self.options.overlap and self.options.accumulate == 1
        if self.update.averages is None or runnable is None or not wanted:
            return None
        count = len(self.capture.learned)
        if not all_written(runnable.bound, count):
            return None
        return OverlappedAllReduce(runnable.bound, count, self.update.averages)
