"""`torch.compile(model, backend="convoy")`: the graph that Dynamo caught goes through the same pipeline as any model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from convoy.pipeline.traced import compile_for_training
from convoy.settings import Settings


class _Closed(nn.Module):
    """A Dynamo graph whose parameters and buffers are its own again; called with the remaining inputs alone.

    Dynamo lifts them to inputs and marks them as static; convolution weights must be constants to be packed once.
    """

    def __init__(self, graph_module: fx.GraphModule, inputs: Sequence[Any], static: Sequence[bool]) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.static = list(static)
        for index, (tensor, is_static) in enumerate(zip(inputs, static, strict=True)):
            if not is_static:
                continue
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"p{index}", tensor)
            else:
                self.register_buffer(f"p{index}", tensor)

    def forward(self, *free: Any) -> Any:
        rest = iter(free)
        return self.graph_module(*(getattr(self, f"p{i}") if s else next(rest) for i, s in enumerate(self.static)))


def dynamo_backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph (registered as the backend `convoy` by entry point).

    A graph that needs gradients is cut into a forward and a backward pass, and each is tuned when it is first called. Graphs
    with symbolic shapes run as Dynamo caught them, with one warning.

    Args:
        graph_module: the graph, parameters lifted to inputs.
        example_inputs: tensors in the graph's input order.
        options: fields of `convoy.Settings` by name, as `torch.compile(..., options={...})` passes them.

    Returns:
        A function of all the graph's inputs.
    """
    from convoy.pipeline.optimize import optimize_model

    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    static = ["_dynamo_static_input_type" in node.meta.get("tensor_dict", {}) for node in placeholders]
    settings = Settings(**(options or {}))
    if any(not isinstance(value, torch.Tensor) for value in example_inputs):
        reason = "symbolic shapes are not supported"
        warnings.warn(f"convoy: {reason}: this graph runs as PyTorch runs it", stacklevel=2)
        return graph_module.forward
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in example_inputs):
        return compile_for_training(graph_module, example_inputs, settings)
    closed = _Closed(graph_module, example_inputs, static).eval()
    free = [index for index, is_static in enumerate(static) if not is_static]
    result = optimize_model(closed, tuple(example_inputs[i] for i in free), name="torch.compile", settings=settings)
    program = result.program

    def run(*inputs: Any) -> Any:
        return program(*[inputs[i] for i in free])

    return run
