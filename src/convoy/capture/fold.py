"""Inference batch norm into the convolution or linear layer before it.

    %y = conv2d(%x, %w, %b, ...)                                          -->  %z = conv2d(%x, %w', %b', ...)
    %z, _, _ = aten._native_batch_norm_legit_no_training.default(%y, ...)

with w' = w · gamma / sqrt(var + eps) and b' = (b - mean) · gamma / sqrt(var + eps) + beta, where y has no other reader.
Computed in float64 and rounded once, so the folded net is as exact as the two steps.
"""

from __future__ import annotations

import torch

from convoy.graph.ir import Graph, Node, Ref, Value
from convoy.graph.rebuild import rebuild
from convoy.problem import TensorSpec

BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"


def fold_batch_norms(graph: Graph, constants: dict[str, torch.Tensor]) -> tuple[Graph, dict[str, torch.Tensor]]:
    """Fold wherever it is legal; returns the new graph and its constants."""
    tensors = dict(constants)
    values = dict(graph.values)
    folded: dict[str, Node] = {}
    gone: set[str] = set()
    for norm in graph.nodes:
        main = _foldable(graph, norm, tensors)
        if main is None:
            continue
        scale, shift = _affine(norm, tensors)
        folded[norm.name] = _fold(main, norm, scale, shift, tensors, values)
        gone.add(main.name)
    nodes = [folded.get(node.name, node) for node in graph.nodes if node.name not in gone]
    result = rebuild(graph.inputs, graph.outputs, values, nodes)
    return result, {value.name: tensors[value.name] for value in result.constants()}


def _foldable(graph: Graph, norm: Node, tensors: dict[str, torch.Tensor]) -> Node | None:
    """The convolution or linear layer that a batch norm may be folded into."""
    if norm.op != BATCH_NORM or not isinstance(norm.args[0], Ref) or any(norm.outputs[1:]):
        return None
    source = norm.args[0].name
    main = graph.producer(source)
    if main is None or main.op not in ("conv2d", "linear") or len(graph.users(source)) != 1 or source in graph.outputs:
        return None
    held = [arg.name for arg in (*main.args[1:3], *norm.args[1:5]) if isinstance(arg, Ref)]
    return main if all(name in tensors for name in held) else None


def _affine(norm: Node, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch norm as y · scale + shift, float64, one value a channel."""
    gamma, beta, mean, variance = (
        tensors[arg.name].double() if isinstance(arg, Ref) else None for arg in norm.args[1:5]
    )
    assert mean is not None
    assert variance is not None
    epsilon = norm.args[6]
    assert isinstance(epsilon, (int, float))
    scale = torch.rsqrt(variance + epsilon) * (1.0 if gamma is None else gamma)
    return scale, (0.0 if beta is None else beta) - mean * scale


def _fold(
    main: Node,
    norm: Node,
    scale: torch.Tensor,
    shift: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    values: dict[str, Value],
) -> Node:
    x, weight_ref, bias_ref = main.args[:3]
    assert isinstance(weight_ref, Ref)
    weight = tensors[weight_ref.name]
    bias = tensors[bias_ref.name].double() if isinstance(bias_ref, Ref) else torch.zeros_like(shift)
    made = {
        f"{norm.name}.weight": (weight.double() * scale.reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype),
        f"{norm.name}.bias": (bias * scale + shift).to(weight.dtype),
    }
    dtype = values[weight_ref.name].spec.dtype
    for name, tensor in made.items():
        tensors[name] = tensor.contiguous()
        values[name] = Value(name, TensorSpec(tuple(tensor.shape), dtype), "constant")
    refs = tuple(Ref(name) for name in made)
    return Node(norm.outputs[0], main.op, (x, *refs, *main.args[3:]), (), (norm.outputs[0],))
