"""StepTensors: the tensors that a training step reads besides its batch, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from convoy.capture.loss_module import LossModule

LIFTED = "lifted"
"""First part of the name of a tensor that Python code holds: `lifted.0`."""


class StepTensors:
    """Parameters and buffers of a model and its loss, and tensors that their code holds otherwise, such as a closure's.

    The model's have their own names; a loss module's begin with `loss_fn.`, the others with `lifted.`.

    Args:
        module: the model and its loss.
        lifted: tensors that their code holds. One that requires a gradient is a parameter, any other a buffer.

    Attributes:
        parameters: name → parameter; each once.
        buffers: name → buffer; each once.
    """

    def __init__(self, module: LossModule, lifted: Sequence[torch.Tensor] = ()) -> None:
        self.parameters: dict[str, torch.Tensor] = _named(module.named_parameters())
        self.buffers: dict[str, torch.Tensor] = {}
        for name, buffer in _named(module.named_buffers()).items():
            self.buffers[_free(name, self.parameters)] = buffer
        for index, tensor in enumerate(lifted):
            taken = {**self.parameters, **self.buffers}
            where = self.parameters if tensor.requires_grad else self.buffers
            where[_free(f"{LIFTED}.{index}", taken)] = tensor

    @property
    def learning(self) -> dict[str, nn.Parameter]:
        """Name → parameter that requires a gradient."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}  # pyright: ignore[reportReturnType]

    def all(self) -> dict[str, torch.Tensor]:
        """Parameters, then buffers."""
        return {**self.parameters, **self.buffers}


def _named(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The model's tensors by their names in the model, then the loss's."""
    held = list(pairs)
    named = {name.removeprefix("model."): tensor for name, tensor in held if name.startswith("model.")}
    for name, tensor in held:
        if not name.startswith("model."):
            named[_free(name, named)] = tensor
    return named


def _free(name: str, taken: Mapping[str, object]) -> str:
    """A name that nothing has: a model may have a child that is called `loss_fn`."""
    while name in taken:
        name = f"{name}_"
    return name
