"""Pruning a model: masks for its layers, laid on in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convoy.capture.export import export_inference
from convoy.errors import InputError
from convoy.prune.channels import consistent_masks, keep_outputs
from convoy.prune.magnitude import PrunableLayer, Recipe, check_finite, magnitude_masks, prunable_layers
from convoy.prune.masks import apply_masks, bake_masks
from convoy.prune.result import PrunedLayer
from convoy.typed_torch import l2_norm


@dataclass(frozen=True, slots=True)
class Pruned:
    """Result of `prune_model`.

    Attributes:
        layers: one row for each convolution or linear layer.
        masks: by parameter name; True for weights that are kept. `finetune` holds the others at zero.
        notes: remarks for the reader.
    """

    layers: tuple[PrunedLayer, ...]
    masks: dict[str, torch.Tensor]
    notes: tuple[str, ...]


def prune_model(model: nn.Module, recipe: Recipe, args: tuple[Any, ...] | None = None) -> Pruned:
    """Set the weights of least magnitude to zero, in place.

    Weights that are zero already count towards the sparsity. Masks that torch.nn.utils.prune left on the model become plain
    zeros first. With pattern `channel`, whole filters become zero, and with them their bias, the scale and shift of the
    batch norm that follows, and the weights that read their channels. No shape changes.

    Args:
        model: on any device.
        recipe: pattern, sparsity, scope, layers to skip.
        args: example inputs; pattern `channel` needs them to find the layers that read each channel.

    Raises:
        InputError: weights that are not finite, no layer that the pattern fits, or no `args` for `channel`.
        CaptureError: pattern `channel`, and a model that cannot be exported.
    """
    notes = [f"{name} had a mask of torch.nn.utils.prune, which became zeros" for name in bake_masks(model)]
    layers = prunable_layers(model, recipe)
    check_finite(layers)
    program = None
    if recipe.pattern.kind == "channel":
        if args is None:
            raise InputError("args", args, "example inputs with pattern channel")
        program = export_inference(model, args, {})
        layers = keep_outputs(layers, model, program)
        if all(layer.reason for layer in layers):
            raise InputError("pattern", "channel", "a layer whose channels are not the model's outputs")
    chosen = magnitude_masks(layers, recipe)
    masks = (
        consistent_masks(chosen, layers, model, program)
        if program is not None
        else {f"{layer.name}.weight": chosen[layer.name] for layer in layers if layer.name in chosen}
    )
    before = {layer.name: layer.weight.clone() for layer in layers}
    masks = _for_every_name({name: mask.view_as(model.get_parameter(name)) for name, mask in masks.items()}, layers)
    apply_masks(model, masks)
    return Pruned(tuple(_row(layer, before[layer.name]) for layer in layers), masks, tuple(notes))


def _for_every_name(masks: dict[str, torch.Tensor], layers: list[PrunableLayer]) -> dict[str, torch.Tensor]:
    """The masks, with one entry for each of the modules that share a weight."""
    found = dict(masks)
    for layer in layers:
        for name in layer.names[1:]:
            if f"{layer.name}.weight" in masks:
                found[f"{name}.weight"] = masks[f"{layer.name}.weight"]
    return found


def _row(layer: PrunableLayer, before: torch.Tensor) -> PrunedLayer:
    after = layer.weight
    whole = l2_norm(before.double())
    return PrunedLayer(
        name=layer.name,
        shape=tuple(layer.module.weight.shape),
        zeros_before=int((before == 0).sum()),
        zeros_after=int((after == 0).sum()),
        kept_norm=l2_norm(after.double()) / whole if whole else 1.0,
        reason=layer.reason,
    )
