"""capture_training: from a model, its loss and a batch to one graph of the whole step but for the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from convoy.capture.batch import FlatBatch, flatten_batch
from convoy.capture.captured import Captured
from convoy.capture.draft import Draft, verify_captured
from convoy.capture.joint import Joint, ParameterNames, trace_joint
from convoy.capture.loss_module import LossModule
from convoy.capture.lower_nodes import NodeLowering
from convoy.capture.passes.fold_constants import fold_constants
from convoy.capture.passes.narrow_indices import narrow_indices
from convoy.capture.passes.one_dimensional import one_dimensional
from convoy.capture.passes.recognise_layers import recognise_layers
from convoy.capture.passes.regular_pools import regular_pools
from convoy.capture.passes.remove_identities import remove_identities
from convoy.capture.passes.split_backward import split_backward
from convoy.capture.passes.three_dimensional import three_dimensional
from convoy.capture.passes.total_dropout import total_dropout
from convoy.capture.passes.transposed_convolutions import transposed_convolutions
from convoy.capture.passes.unset_values import unset_values
from convoy.capture.structure import Leaf, Structure
from convoy.capture.user_hooks import user_hook
from convoy.errors import CaptureError
from convoy.graph.ir import Node, Ref
from convoy.graph.randomness import draws_random

PASSES: Final = (
    remove_identities,
    total_dropout,
    unset_values,
    regular_pools,
    fold_constants,
    one_dimensional,
    three_dimensional,
    transposed_convolutions,
    recognise_layers,
    split_backward,
    narrow_indices,
)


@dataclass(frozen=True, slots=True)
class TrainingCapture:
    """A training step as a graph.

    Attributes:
        captured: the graph; inputs are the parameters, the buffers and the batch's tensors, outputs the loss, the gradients and
            the buffers' new values, in the orders below.
        parameters: names of the parameters.
        buffers: names of the buffers.
        learned: names of the parameters whose gradients are outputs.
        updated: names of the buffers whose new values are outputs.
        counted: names of the integer buffers that every step adds one to, and that the graph leaves out.
        random: whether the step draws random numbers.
        lifted: tensors besides parameters and buffers that the model's or the loss's code holds; some of the names above are
            theirs (`StepTensors`).
        reached: names of the tensors that code reads by itself: a run on a copy of the model must be handed the copy's
            (`TensorSubstitution`).
    """

    captured: Captured
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    learned: tuple[str, ...]
    updated: tuple[str, ...]
    counted: tuple[str, ...]
    random: bool
    lifted: tuple[torch.Tensor, ...] = ()
    reached: tuple[str, ...] = ()


def capture_training(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    batch: tuple[Any, ...],
    *,
    amp: torch.dtype | None = None,
    scaled: bool = False,
    deterministic: bool = False,
) -> TrainingCapture:
    """Capture what one training step computes, for a batch of these shapes and in the module's present training modes.

    Args:
        model: any module that AOTAutograd can trace; not changed.
        loss_fn: (output, *targets) → one number.
        batch: (x, *targets); x as `call_model` takes it. Entries that are no tensors become part of the graph.
        amp: dtype of autocast, or None.
        scaled: whether the batch's last entry is a factor that the loss is multiplied by before it is derived.
        deterministic: whether the graph has the operators of which PyTorch has a way that gives the same bits in every run.

    Raises:
        CaptureError: it cannot be traced, with the tracer's own words, or does what a graph cannot hold.
    """
    module = LossModule(model, loss_fn, amp, scaled=scaled)
    flat = flatten_batch(batch)
    _refuse_python(module, flat)
    joint = trace_joint(module, batch, deterministic=deterministic)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    draft = _lower(joint, device)
    traced, _ = draft.finish()
    for rewrite in PASSES:
        rewrite(draft)
    counted, kept = _counters(draft, joint)
    draft.outputs = [draft.outputs[index] for index in kept]
    _copy_what_is_returned_as_it_came(draft)
    graph, constants = draft.finish()
    verify_captured(graph)
    held: list[Leaf] = [None] * len(graph.inputs)
    arguments = Structure(pytree.tree_structure((tuple(held), {})), held, plain=True)
    results = Structure(pytree.tree_structure(list(graph.outputs)), [None] * len(graph.outputs))
    return TrainingCapture(
        captured=Captured(graph, constants, arguments, results, tuple(dict.fromkeys(draft.notes)), traced=traced),
        parameters=joint.parameters,
        buffers=joint.buffers,
        learned=joint.learned,
        updated=tuple(name for name in joint.updated if name not in counted),
        counted=counted,
        random=any(draws_random(node) for node in graph.nodes),
        lifted=joint.lifted,
        reached=joint.reached,
    )


def _refuse_python(module: LossModule, batch: FlatBatch) -> None:
    """Refuse what Python must do in every step, and a graph cannot."""
    hook = user_hook(module, backward=True).removeprefix("model.")
    if hook:
        raise CaptureError(f"{hook}, which Python must call in every step")
    if any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules()):
        raise CaptureError("a module is a ScriptModule, which cannot be traced")
    if batch.strangers:
        raise CaptureError(f"the batch holds a {type(batch.strangers[0]).__name__}, which a graph cannot hold")


def _lower(joint: Joint, device: torch.device) -> Draft:
    """The joint graph as a draft whose outputs are the loss, the gradients, and the buffers' new values."""
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    names = [*joint.parameters, *joint.buffers]
    batch = [f"batch.{index}" for index in range(len(placeholders) - len(names))]
    lowering = NodeLowering(device, ParameterNames(dict(zip(placeholders, joint.parameters, strict=False))))
    for node, name in zip(placeholders, [*names, *batch], strict=True):
        lowering.input(node, name)
    for node in joint.graph.nodes:
        if node.op == "get_attr":
            lowering.constant(node, joint.constants[str(node.target)])
        elif node.op == "call_function":
            lowering.call(node)
    (output,) = (node for node in joint.graph.nodes if node.op == "output")
    returned = list(output.args[0])
    updates, rest = returned[: len(joint.updated)], returned[len(joint.updated) :]
    for node in (rest[joint.losses - 1], *rest[joint.losses :], *updates):
        found = lowering.found[node] if isinstance(node, fx.Node) else None
        if not isinstance(found, str):
            raise CaptureError(f"the training step returns {node}, which is no tensor")
        lowering.draft.outputs.append(found)
    return lowering.draft


def _counters(draft: Draft, joint: Joint) -> tuple[tuple[str, ...], list[int]]:
    """Buffers that are but counted up (a batch norm's), and the positions of the outputs that stay.

    One call counts all of them up; in the graph each would be a launch of its own.
    """
    makers = {output: node for node in draft.nodes for output in node.outputs}
    first = 1 + len(joint.learned)
    counted: list[str] = []
    kept = list(range(first))
    for index, name in enumerate(joint.updated, first):
        node = makers.get(draft.outputs[index])
        counts = node is not None and node.op == "aten.add.Tensor" and node.args == (Ref(name), 1) and not node.kwargs
        if counts and draft.specs[name].dtype == "i64" and draft.read_counts()[draft.outputs[index]] == 1:
            counted.append(name)
        else:
            kept.append(index)
    return tuple(counted), kept


def _copy_what_is_returned_as_it_came(draft: Draft) -> None:
    """Return copies of inputs, constants, and values returned before: a caller adds to gradients in place."""
    seen: set[str] = {*draft.inputs, *draft.constants}
    for index, name in enumerate(draft.outputs):
        if name in seen:
            copy = draft.unique(f"{name}.copy")
            draft.specs[copy] = draft.specs[name]
            draft.nodes.append(Node(copy, "aten.clone.default", (Ref(name),), (), (copy,)))
            draft.outputs[index] = copy
        seen.add(draft.outputs[index])
