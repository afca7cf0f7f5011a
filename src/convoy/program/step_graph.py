"""StepGraph: a whole training step, the update included, captured once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from convoy.program.graph import forget_library_workspaces

Work = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""A step on static tensors: batch → loss."""


def why_not_capturable(optimizer: torch.optim.Optimizer, *, scaled: bool) -> str:
    """Why an optimizer's update cannot be captured; empty where it can.

    PyTorch marks the optimizers whose update waits for no device with a `capturable` option; SGD needs none.
    """
    name = type(optimizer).__name__
    if scaled:
        return "a gradient scaler decides on the host whether a step is taken"
    if isinstance(optimizer, torch.optim.SGD) or all("capturable" in group for group in optimizer.param_groups):
        return ""
    return f"PyTorch's {name} cannot be captured"


class StepGraph:
    """A captured step.

    The learning rate is a tensor that the graph reads: a schedule's new value is copied into it before each replay. Any other
    option of the optimizer is part of the graph: `is_stale` says when one was changed.

    Args:
        work: the step.
        example: a batch.
        model: whose parameters and buffers the step reads and writes in place.
        optimizer: its state is there already, from a step that was not captured.

    Raises:
        RuntimeError: something in the step cannot be captured.
    """

    def __init__(
        self, work: Work, example: Sequence[torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._device = example[0].device
        self._rates = _tensor_rates(optimizer, self._device)
        _make_capturable(optimizer, self._device)
        self._batch = [tensor.clone() for tensor in example]
        self._options = _options(optimizer)
        self._places = _places(model)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.no_grad():
            forget_library_workspaces()
            capturing = torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local")
            with _fused_sgd(optimizer), capturing:
                self._loss = work(self._batch)
        self._gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]

    def __call__(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Train on a batch of the example's shapes; gives the loss, in a tensor of its own."""
        with torch.cuda.device(self._device), torch.no_grad():
            for static, tensor in zip(self._batch, batch, strict=True):
                static.copy_(tensor, non_blocking=True)
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                if group["lr"] is not rate:
                    rate.copy_(torch.as_tensor(group["lr"]))
                    group["lr"] = rate
            self._graph.replay()
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            return self._loss.clone()

    def is_stale(self) -> bool:
        """Whether what the graph holds fixed has changed: an option of the optimizer, or where a parameter lies."""
        return self._options != _options(self._optimizer) or self._places != _places(self._model)


def _tensor_rates(optimizer: torch.optim.Optimizer, device: torch.device) -> list[torch.Tensor]:
    """Learning rates as tensors of the device; schedules of PyTorch fill such a tensor in place."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device).clone()
    return [group["lr"] for group in optimizer.param_groups]


def _make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                state[name] = value.to(device)


@contextmanager
def _fused_sgd(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let SGD update in fused kernels: its other forms ask the host for a learning rate that is a tensor, which no capture allows."""
    if not isinstance(optimizer, torch.optim.SGD):
        yield
        return
    before = [(group, group["fused"], group["foreach"]) for group in optimizer.param_groups]
    for group, _, _ in before:
        group["fused"], group["foreach"] = True, False
    try:
        yield
    finally:
        for group, fused, foreach in before:
            group["fused"], group["foreach"] = fused, foreach


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """Every option but the learning rate and the parameters."""
    return [{k: v for k, v in g.items() if k not in ("lr", "params", "initial_lr")} for g in optimizer.param_groups]


def _places(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
