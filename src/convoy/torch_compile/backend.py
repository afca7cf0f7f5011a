"""`torch.compile(model, backend="convoy")`: the graph that Dynamo caught goes through the same pipeline as any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing

from convoy.capture.tracer_words import tracer_words
from convoy.engines.competition import competing_engines
from convoy.errors import InputError, unknown_name
from convoy.pipeline.profile_output import check_profile
from convoy.settings import Settings
from convoy.torch_compile.compiled_passes import compile_passes
from convoy.torch_compile.dispatch_modes import without_modes
from convoy.torch_compile.float_inputs import fix_floats, has_float_input
from convoy.torch_compile.inference_graph import InferenceGraph
from convoy.torch_compile.symbolic_graph import SymbolicGraph
from convoy.user_warning import warn_user

_OPTIONS: Final = tuple(field.name for field in fields(Settings))


def dynamo_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph (registered as the backend `convoy` by entry point).

    A graph that needs gradients is cut into a forward and a backward pass, and each is tuned when it is first called, as is a
    graph without gradients, whose weights are packed. A graph with symbolic shapes is compiled for each shape that comes twice.
    What cannot be captured runs as Dynamo caught it, with one warning.

    Args:
        graph_module: the graph, parameters and buffers lifted to inputs.
        example_inputs: tensors in the graph's input order.
        options: fields of `convoy.Settings` by name, as `torch.compile(..., options={...})` passes them.
        mode: Inductor's modes mean nothing here; only `default` is taken.

    Returns:
        A function of all the graph's inputs.

    Raises:
        InputError: an option that there is not, or a value that it does not take; Dynamo wraps it in BackendCompilerFailed.
    """
    settings = settings_of(options or {}, mode)
    # Graph breaks may leave a graph of sizes alone: there is nothing to tune, and nothing to tell.
    if not any(isinstance(value, torch.Tensor) for value in (*example_inputs, *_held(graph_module))):
        return graph_module.forward
    reason = _why_not(example_inputs)
    if reason:
        return _as_caught(graph_module, reason)
    fix_floats(graph_module)
    if all(isinstance(value, torch.Tensor) and not _is_symbolic(value) for value in example_inputs):
        return _compiled(graph_module, example_inputs, settings)

    def compile_fixed(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        with without_modes(autocast=False, gradients=torch.is_grad_enabled()), tracing(TracingContext(None)):
            return _compiled(module, inputs, settings)

    return SymbolicGraph(graph_module, _weights_at(graph_module, example_inputs), compile_fixed)


def _compiled(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor], settings: Settings) -> Callable[..., Any]:
    """A graph of fixed shapes, compiled; as Dynamo caught it where that fails."""
    if any(node.target is torch.ops.higher_order.tag_activation_checkpoint for node in graph_module.graph.nodes):
        from torch._dynamo import lookup_backend

        # Its marks mean something to AOTAutograd alone, and what the marked part writes to its inputs must stay in the graph.
        warn_user("torch.compile: PyTorch runs a graph with checkpointed activations, by its backend `aot_eager`")
        return lookup_backend("aot_eager")(graph_module, list(inputs))
    try:
        passes = compile_passes(graph_module, inputs, settings)
    except Exception as error:  # AOTAutograd runs the user's operators on fake tensors: anything may come out of it
        return _as_caught(graph_module, tracer_words(error).partition("\n")[0])
    if not passes.is_plain or _autocasts() or has_float_input(graph_module):
        return passes.run
    return InferenceGraph(graph_module, _weights_at(graph_module, inputs), settings)


def _as_caught(graph_module: fx.GraphModule, reason: str) -> Callable[..., Any]:
    warn_user(f"torch.compile: PyTorch runs a graph as Dynamo caught it: {reason}")
    return graph_module.forward


def settings_of(options: Mapping[str, Any], mode: str | None = None) -> Settings:
    """The settings that a backend's options name.

    Raises:
        InputError: naming the option.
    """
    if mode not in (None, "default"):
        raise InputError("mode", mode, "no mode with this backend", 'Pass options={"effort": "full"} to measure more.')
    for name in options:
        if name not in _OPTIONS:
            raise unknown_name("options", name, _OPTIONS)
    settings = Settings(**options)
    competing_engines(settings)
    check_profile(settings)
    return settings


def _why_not(inputs: Sequence[Any]) -> str:
    """Why a graph with these inputs is not for Convoy; empty where it is."""
    from torch._subclasses.fake_tensor import FakeTensor

    for value in inputs:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
            continue
        if not isinstance(value, torch.Tensor):
            return f"an input is a {type(value).__name__}, not a tensor"
        # DistributedDataParallel has Dynamo's graphs cut and compiled with fake tensors; the first call brings real ones.
        if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor):
            return f"an input is a {type(value).__name__}, a tensor with operators of its own"
    return ""


def _held(graph_module: fx.GraphModule) -> tuple[torch.Tensor, ...]:
    return (*graph_module.parameters(), *graph_module.buffers())


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return any(isinstance(side, torch.SymInt) for side in tensor.shape)


def _autocasts() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _weights_at(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Inputs that Dynamo marks as a module's own, or that are parameters."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    return [
        index
        for index, (node, value) in enumerate(zip(placeholders, inputs, strict=True))
        if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {}) or isinstance(value, nn.Parameter)
    ]
