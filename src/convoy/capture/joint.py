"""From a model, its loss and a batch to one ATen graph of the forward and the backward pass, by AOTAutograd.

The one module that uses `torch._functorch`: torch 2.11 to 2.13 have no public name for AOTAutograd's joint graph.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from convoy.capture.copies import copy_module
from convoy.capture.export import quiet
from convoy.capture.names import operator_name
from convoy.capture.restrides import remove_restrides
from convoy.errors import CaptureError

_LONGEST_MESSAGE = 2000
"""Characters of the tracer's words that are kept."""

_SHOWN = 3
"""Names of parameters listed in a message."""


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph.

    Attributes:
        graph: the fx graph; its placeholders are the parameters, the buffers and the batch, in this order.
        parameters: names of the parameters, in order.
        buffers: names of the buffers, in order.
        updated: names of the buffers that the step replaces: the graph's first outputs.
        losses: how many outputs follow; the last of them is the loss as `loss_fn` gave it.
        learned: names of the parameters that have a gradient: the graph's last outputs.
    """

    graph: fx.Graph
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    updated: tuple[str, ...]
    losses: int
    learned: tuple[str, ...]


class LossModule(nn.Module):
    """A model and its loss as one module: (x, *targets) → the loss, under autocast where it was asked for.

    Args:
        model: called with x, or with x's items where x is a tuple.
        loss_fn: (the model's output, *targets) → a scalar.
        amp: dtype of autocast, or None.
        scaled: whether the last argument of a call is a factor for the loss, as a gradient scaler wants it.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., torch.Tensor], amp: torch.dtype | None, *, scaled: bool
    ) -> None:
        super().__init__()
        self.model, self.loss_fn, self.amp, self.scaled = model, loss_fn, amp, scaled

    def forward(self, x: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        """The loss to derive, and where it is scaled the loss itself."""
        targets, scale = (rest[:-1], rest[-1]) if self.scaled else (rest, None)
        device = next((t.device.type for t in self.model.parameters()), "cpu")
        context = torch.autocast(device, self.amp) if self.amp is not None else contextlib.nullcontext()
        with context:
            output = self.model(*x) if isinstance(x, tuple) else self.model(x)
            loss = self.loss_fn(output, *targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(f"loss_fn: gave {shape}, expected one number")
        return (loss,) if scale is None else (loss * scale, loss.detach())


def trace_joint(module: LossModule, batch: tuple[Any, ...]) -> Joint:
    """Trace loss and gradients for a batch of these shapes, in the module's present training modes.

    Raises:
        CaptureError: the model or its loss cannot be traced, with the tracer's own words.
    """
    from torch._functorch.aot_autograd import aot_export_module

    try:
        with quiet(), _kept(module), torch.enable_grad():
            traced, signature = aot_export_module(module, batch, trace_joint=True, output_loss_index=0)
    except CaptureError:
        raise
    except Exception as error:  # the tracer runs the user's forward: anything may come out of it
        idle = _idle_parameters(module, batch) if "did not receive a gradient" in str(error) else []
        if idle:
            named = ", ".join(idle[:_SHOWN]) + (", ..." if len(idle) > _SHOWN else "")
            raise CaptureError(f"no part in the loss: {named}; set requires_grad to False, or use them") from error
        words = str(error).strip()[:_LONGEST_MESSAGE]
        raise CaptureError(f"the training step cannot be traced: {type(error).__name__}: {words}") from error
    if signature.user_inputs_to_mutate or signature.parameters_to_mutate:
        changed = sorted({*signature.user_inputs_to_mutate.values(), *signature.parameters_to_mutate.values()})
        raise CaptureError(f"the training step overwrites {', '.join(changed)}, which a graph cannot hold")
    remove_restrides(traced.graph)
    learned = [name for name, parameter in module.model.named_parameters() if parameter.requires_grad]
    updated, losses = list(signature.buffers_to_mutate.values()), len(signature.user_outputs)
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    assert len(output.args[0]) == len(updated) + losses + len(learned)
    return Joint(
        graph=traced.graph,
        parameters=tuple(name.removeprefix("model.") for name in signature.parameters),
        buffers=tuple(name.removeprefix("model.") for name in signature.buffers),
        updated=tuple(name.removeprefix("model.") for name in updated),
        losses=losses,
        learned=tuple(learned),
    )


@contextlib.contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Put back the computed tensors on modules, such as a pruned weight: a traced forward leaves the tracer's own there."""
    held = [(m, name, v) for m in module.modules() for name, v in vars(m).items() if isinstance(v, torch.Tensor)]
    try:
        yield
    finally:
        for owner, name, value in held:
            setattr(owner, name, value)


def _idle_parameters(module: LossModule, batch: tuple[Any, ...]) -> list[str]:
    """Names of the parameters that the loss of a copy of the module does not depend on."""
    twin = copy_module(module)
    learning = [(name, parameter) for name, parameter in twin.model.named_parameters() if parameter.requires_grad]
    with torch.enable_grad():
        loss = twin(*batch)[0]
        found = torch.autograd.grad(loss, [parameter for _, parameter in learning], allow_unused=True)
    return [name for (name, _), gradient in zip(learning, found, strict=True) if gradient is None]


class ParameterNames:
    """Names the calls of a joint graph after the parameter that they read; the tracer keeps no module paths.

    Args:
        parameters: placeholder → the parameter's name.
    """

    def __init__(self, parameters: dict[fx.Node, str]) -> None:
        self._parameters = parameters

    def name(self, node: fx.Node) -> str:
        """`layer1.0.conv1` for what reads `layer1.0.conv1.weight`, with `.backward` behind it in the backward pass."""
        op = operator_name(node)
        paths = [path for path in map(self._path, node.all_input_nodes) if path]
        layer = re.search("convolution|batch_norm|addmm|_norm", str(node.target))
        if not paths or not layer:
            return op
        return f"{paths[0]}.backward" if "backward" in str(node.target) else paths[0]

    def _path(self, node: fx.Node) -> str:
        """Path of the module whose parameter a value is, casts and transpositions aside."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1 and operator_name(node) in ("to_copy", "t"):
            node = node.all_input_nodes[0]
        return self._parameters.get(node, "").rpartition(".")[0]
