"""From a model, its loss and a batch to one ATen graph of the forward and the backward pass, by AOTAutograd.

The one module that uses `torch._functorch`: torch 2.11 to 2.13 have no public name for AOTAutograd's joint graph.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from convoy.capture.export import quiet
from convoy.capture.function_state import FunctionState
from convoy.capture.loss_module import LossModule
from convoy.capture.node_names import operator_name
from convoy.capture.passes.remove_restrides import remove_restrides
from convoy.capture.recording.undecomposed import undecomposed
from convoy.capture.traced_step import SharedGradientError, TracedStep, UnliftedError, UnusedParametersError
from convoy.capture.tracer_words import tracer_words
from convoy.errors import CaptureError, InputError

_TRIES = 5
"""Traces: three may find tensors that must be lifted, parameters without a part in the loss, and gradients that are one value."""


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
        lifted: tensors that the model's or the loss's code holds outside of parameters and buffers (`StepTensors`).
        reached: names of the tensors that code reads by itself, and not through the module that they belong to.
        constants: tensors of the graph's own, by the name that `get_attr` nodes read.
    """

    graph: fx.Graph
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    updated: tuple[str, ...]
    losses: int
    learned: tuple[str, ...]
    lifted: tuple[torch.Tensor, ...]
    reached: tuple[str, ...]
    constants: dict[str, torch.Tensor]


def trace_joint(module: LossModule, batch: tuple[Any, ...], *, deterministic: bool = False) -> Joint:
    """Trace loss and gradients for a batch of these shapes, in the module's present training modes.

    Tensors that the model's or the loss's code holds outside of parameters and buffers, such as class weights in a closure,
    become inputs of the graph (`Joint.lifted`), so that what is written into them later counts. `deterministic`: as for
    `undecomposed`.

    Raises:
        CaptureError: the model or its loss cannot be traced, with the tracer's own words.
        InputError: `loss_fn` returned something else than one number.
    """
    state = python_reads_of(module)
    try:
        return _trace_lifted(module, batch, deterministic=deterministic)
    finally:
        changed = state.changed()
        if changed:
            state.restore()
            raise CaptureError(
                f"the model or its loss changes {changed!r} in every call, which a graph would leave out"
            )


def python_reads_of(module: LossModule) -> FunctionState:
    """What the loss, and the forward of modules that are not torch's, read besides their arguments.

    Of objects and functions that are attributes of such modules, such as `self.config`, too; modules, tensors, numbers and
    collections there are watched by `ModuleState`.
    """
    modules = list(module.modules())
    own = [inner for inner in modules if not type(inner).__module__.startswith(("torch.", "convoy."))]
    forwards = [getattr(kind, "forward", None) for kind in {type(inner) for inner in own}]
    loss = () if isinstance(module.loss_fn, nn.Module) else (module.loss_fn,)
    held = [item for inner in own for item in vars(inner).items() if _is_object(item[1])]
    return FunctionState((*loss, *forwards), modules, held)


def _is_object(value: object) -> bool:
    """Whether a value may hold others in attributes, a closure or globals."""
    kinds: tuple[type[Any], ...] = (torch.Tensor, nn.Module, dict, list, set, tuple, type)
    return hasattr(value, "__dict__") and not isinstance(value, kinds)


def _trace_lifted(module: LossModule, batch: tuple[Any, ...], *, deterministic: bool) -> Joint:
    """Trace again and again, until all tensors that code holds are known."""
    lifted: list[torch.Tensor] = []
    idle: set[str] = set()
    apart = False
    for _ in range(_TRIES):
        traced = TracedStep(module, batch, lifted, idle, apart=apart)
        try:
            return _trace(traced, deterministic=deterministic)
        except UnliftedError as found:
            lifted.extend(found.tensors)
        except SharedGradientError:
            if apart:
                raise
            apart = True
        except UnusedParametersError:
            unused = traced.idle_parameters()
            if not unused:
                raise
            idle.update(unused)
    raise CaptureError("the training step reads other tensors in every call, which a graph cannot hold")


def _trace(step: TracedStep, *, deterministic: bool) -> Joint:
    from torch._functorch.aot_autograd import aot_export_module

    names = step.names
    try:
        autocast = torch.autocast(step.device.type, enabled=False)
        with (
            step.faked() as leaves, quiet(), undecomposed(deterministic=deterministic), torch.enable_grad(), autocast,
        ):  # fmt: skip
            made = aot_export_module(step, leaves, trace_joint=True, output_loss_index=0)
    except (CaptureError, InputError, UnliftedError):
        raise
    except Exception as error:  # the tracer runs the user's forward: anything may come out of it
        words = str(error).strip()
        kind: type[CaptureError] = CaptureError
        if "did not receive a gradient" in words:
            kind = UnusedParametersError
        elif isinstance(error, AssertionError) and (not words or "gradients_to_parameters" in words):
            kind = SharedGradientError
        raise kind(f"the training step cannot be traced: {tracer_words(error)}") from error
    finally:
        step.check_python_state()
    traced, signature = cast("fx.GraphModule", made[0]), made[1]
    if signature.user_inputs_to_mutate or signature.parameters_to_mutate:
        changed = [names.get(name, name) for name in signature.parameters_to_mutate.values()]
        changed += ["the batch"] * bool(signature.user_inputs_to_mutate)
        raise CaptureError(f"the training step overwrites {', '.join(changed)}, which a graph cannot hold")
    remove_restrides(traced.graph)
    updated, losses = list(signature.buffers_to_mutate.values()), len(signature.user_outputs)
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    assert len(output.args[0]) == len(updated) + losses + len(step.learned)
    return Joint(
        graph=traced.graph,
        parameters=tuple(names[name] for name in signature.parameters),
        buffers=tuple(names[name] for name in signature.buffers),
        updated=tuple(names[name] for name in updated),
        losses=losses,
        learned=step.learned,
        lifted=tuple(step.lifted),
        reached=tuple(step.reached),
        constants={
            node.target: getattr(traced, str(node.target)) for node in traced.graph.nodes if node.op == "get_attr"
        },
    )


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
