"""StockWork: a training step by PyTorch's autograd on static tensors, which is captured where a plan is the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from convoy.capture.loss_module import LossModule
from convoy.engines.torch_flags import convolutions
from convoy.training.allreduce.gradient_allreduce import put_gradients


class AutogradStep:
    """Loss, gradients and update of one micro-batch by PyTorch's own operators, on torch's current stream.

    A convolution is chosen by cuDNN's search, as where a plan is measured against PyTorch; the search itself happens in the first
    call, which must not be captured.

    Args:
        module: model, loss and autocast.
        rebuild: a batch's tensors → what the module takes.
        learned: parameters that get a gradient.
        accumulate: micro-batches to an update.
        update: what follows the last micro-batch's gradients.
    """

    def __init__(
        self,
        module: LossModule,
        rebuild: Callable[[Sequence[torch.Tensor]], tuple[Any, ...]],
        learned: Sequence[nn.Parameter],
        accumulate: int,
        update: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        self._module, self._rebuild, self._learned = module, rebuild, learned
        self._accumulate, self._update = accumulate, update

    def __call__(self, batch: Sequence[torch.Tensor], *, first: bool, last: bool) -> torch.Tensor:
        """Batch → loss; `first` makes the gradients anew, `last` updates."""
        with torch.enable_grad(), convolutions("as_torch", self._learned[0].device):
            made = self._module(*self._rebuild(batch))
            found = cast(
                "Sequence[torch.Tensor | None]",
                torch.autograd.grad(made[0] / self._accumulate, self._learned, allow_unused=True),
            )
        used = [
            (p, in_parameter_layout(p, gradient))
            for p, gradient in zip(self._learned, found, strict=True)
            if gradient is not None
        ]
        with torch.no_grad():
            put_gradients([p for p, _ in used], [gradient for _, gradient in used], add=not first)
            if last:
                self._update([p for p, _ in used])
        return made[-1].detach()


def in_parameter_layout(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in its parameter's memory format, as autograd leaves it: optimizers walk through both side by side."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
