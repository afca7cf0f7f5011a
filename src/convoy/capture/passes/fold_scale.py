"""Products of a layer's output channels with constants, into its weight and bias (ConvNeXt's layer scale)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from convoy.capture.draft import Draft, renamed
from convoy.graph.ir import CONVOLUTIONS, Node, Ref

_LAYERS = (*CONVOLUTIONS, "linear")


def fold_scale(draft: Draft) -> None:
    """Fold a scale for each channel into the convolution or linear layer whose only reader it is.

    before: %y = conv2d(%x, %w, %b, ...); %s = aten.mul.Tensor(%y, %scale)        constant scale: [k, 1, 1]
    -->
    after:  %y = conv2d(%x, %w.scaled, %b.scaled, ...)                            every reader of %s reads %y

    Products are computed in float64 and rounded once. Where one overflows (fp16), the scale stays.
    """
    counts = draft.read_counts()
    layers = {node.outputs[0]: index for index, node in enumerate(draft.nodes) if node.op in _LAYERS}
    volumes = {node.outputs[0] for node in draft.nodes if node.op == "conv3d"}
    names: dict[str, str] = {}
    for index, node in enumerate(draft.nodes):
        found = _scaling(draft, renamed(node, names), volumes)
        if found is None or found[0] not in layers or counts[found[0]] != 1:
            continue
        value, scale = found
        scaled = _scaled(draft, draft.nodes[layers[value]], scale)
        if scaled is None:
            continue
        draft.nodes[layers[value]] = scaled
        draft.nodes[index] = replace(node, outputs=("",))
        names[node.outputs[0]] = value
        counts[value] = counts[node.outputs[0]]
    draft.rename(names)
    draft.nodes = [node for node in draft.nodes if any(node.outputs)]


def _scaling(draft: Draft, node: Node, volumes: Collection[str]) -> tuple[str, torch.Tensor] | None:
    """The value that a node multiplies with a constant for each channel, and that constant in float64: [k].

    `volumes`: results of three-dimensional convolutions; of other 5-D values the channels are the last side.
    """
    if node.op != "aten.mul.Tensor" or node.kwargs or len(node.args) != 2:
        return None
    for value, scale in (node.args, node.args[::-1]):
        if isinstance(value, Ref) and isinstance(scale, Ref) and scale.name in draft.constants:
            spec, tensor = draft.specs[value.name], draft.constants[scale.name]
            rank = len(spec.shape)
            channel = 1 if rank == 4 or value.name in volumes else rank - 1
            wide = (1,) * (rank - tensor.dim()) + tuple(tensor.shape)
            wanted = tuple(size if axis == channel else 1 for axis, size in enumerate(spec.shape))
            if wide == wanted and draft.specs[node.outputs[0]] == spec and draft.specs[scale.name].dtype == spec.dtype:
                return value.name, tensor.double().flatten()
    return None


def _scaled(draft: Draft, layer: Node, scale: torch.Tensor) -> Node | None:
    """The layer with its weight and bias multiplied; None if they are no constants, or a product overflows."""
    x, weight, bias, *sizes = layer.args
    made: list[Ref | None] = []
    for arg in (weight, bias):
        if arg is None:
            made.append(None)
            continue
        if not isinstance(arg, Ref) or arg.name not in draft.constants:
            return None
        tensor = draft.constants[arg.name]
        product = (tensor.double() * scale.view(-1, *[1] * (tensor.dim() - 1))).to(tensor.dtype)
        if not product.isfinite().all():
            return None
        made.append(Ref(draft.add_constant(f"{arg.name}.scaled", product)))
    return replace(layer, args=(x, *made, *sizes))
