"""StepGraph: a whole training step, the update included, captured once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from convoy.program.cuda.recording import distinct_stream, recording
from convoy.training.capturable_optimizers import capturable


class StepFunction(Protocol):
    """A step, or one micro-batch of it, on static tensors."""

    def __call__(self, batch: Sequence[torch.Tensor], *, first: bool, last: bool) -> torch.Tensor:
        """Batch → loss; `first` makes the gradients anew, `last` updates."""
        ...


class StepGraph:
    """A captured step: one graph, or, where gradients are accumulated, one each for the first, the middle and the last call.

    The learning rate is a tensor that the graph reads: a schedule's new value is filled in before a replay. Everything else is
    held fixed, and a `CaptureGuard` says when it has changed.

    Args:
        work: the step.
        example: a batch.
        parameters: those that the step may give gradients.
        optimizer: its state is there already, from a step that was not captured.
        scaler: a gradient scaler that is on, or None.
        micro: calls to an update.
        streams: those that the step uses itself.
        keeps: what must live as long as the graph, which holds addresses alone.

    Raises:
        RuntimeError, LaunchError: something in the step cannot be captured.
    """

    def __init__(
        self,
        work: StepFunction,
        example: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        micro: int = 1,
        streams: Collection[torch.cuda.Stream] = (),
        keeps: object = None,
    ) -> None:
        self._optimizer, self._micro, self._keeps = optimizer, micro, keeps
        self._device = example[0].device
        self._batch = [tensor.clone() for tensor in example]
        self._rates = [torch.zeros((), device=self._device) for _ in optimizer.param_groups]
        self._filled: list[float | None] = [None] * len(self._rates)
        self._fill_rates()
        self._graphs: dict[tuple[bool, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        stream = distinct_stream(self._device, streams)
        pool = None
        with torch.no_grad(), capturable(optimizer, self._rates, scaler):
            for phase in dict.fromkeys(self._phase(index) for index in range(micro)):
                graph = torch.cuda.CUDAGraph()
                with recording(graph, stream, pool):
                    loss = work(self._batch, first=phase[0], last=phase[1])
                self._graphs[phase] = graph, loss
                pool = graph.pool()  # the graphs are replayed one after another: they share their memory
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]

    def __call__(self, batch: Sequence[torch.Tensor], index: int = 0) -> torch.Tensor:
        """Train on a batch of the example's shapes, call `index` of an update; gives the loss, in a tensor of its own."""
        graph, loss = self._graphs[self._phase(index)]
        with torch.cuda.device(self._device), torch.no_grad():
            for static, tensor in zip(self._batch, batch, strict=True):
                static.copy_(tensor, non_blocking=True)
            self._fill_rates()
            graph.replay()
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            return loss.clone()

    def replay(self) -> None:
        """Launch the first call's graph on the batch of the last call, without copies: for timing."""
        graph, _ = self._graphs[self._phase(0)]
        with torch.cuda.device(self._device):
            graph.replay()

    def release(self) -> None:
        """Destroy the graphs, once all their launches are through; they cannot be replayed after that."""
        torch.cuda.synchronize(self._device)
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _phase(self, index: int) -> tuple[bool, bool]:
        return index == 0, index == self._micro - 1

    def _fill_rates(self) -> None:
        """The present learning rates, where they are not there already."""
        for index, (group, rate) in enumerate(zip(self._optimizer.param_groups, self._rates, strict=True)):
            given = group["lr"]
            if isinstance(given, torch.Tensor):
                rate.copy_(given.reshape(()), non_blocking=True)
            elif given != self._filled[index]:
                rate.fill_(given)
                self._filled[index] = given
