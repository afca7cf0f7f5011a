"""Masks on parameters: laid on by torch.nn.utils.prune, which keeps them through training, and made zeros at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils import prune as torch_prune


def bake_masks(model: nn.Module) -> list[str]:
    """Turn masks that torch.nn.utils.prune left on a model into zeros; the names of the parameters that had some."""
    found: list[str] = []
    for path, module in model.named_modules():
        for name in [n.removesuffix("_mask") for n, _ in module.named_buffers(recurse=False) if n.endswith("_mask")]:
            if hasattr(module, f"{name}_orig"):
                _settle(module, name, getattr(module, f"{name}_mask").bool())
                found.append(f"{path}.{name}" if path else name)
    return found


@contextmanager
def masked(model: nn.Module, masks: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Hold parameters at zero where their masks are False while the model is trained; afterwards they are true zeros.

    Meanwhile a parameter `weight` is `weight_orig` with a buffer `weight_mask`, and the product of both is recomputed before
    each forward pass: what is pruned gets no gradient.

    Args:
        model: changed in place.
        masks: by parameter name (`layer1.0.conv1.weight`), boolean, of the parameter's shape. A parameter that several
            modules share is named once for each.
    """
    places = [(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], m) for path, m in masks.items()]
    for module, name, mask in places:
        torch_prune.custom_from_mask(module, name, mask)
    try:
        yield
    finally:
        for module, name, mask in places:
            _settle(module, name, mask)


def apply_masks(model: nn.Module, masks: Mapping[str, torch.Tensor]) -> None:
    """Set parameters to zero where their masks are False."""
    with masked(model, masks):
        pass


def _settle(module: nn.Module, name: str, mask: torch.Tensor) -> None:
    """Make a masked parameter a plain one again, with +0 where it is pruned: a product with 0 may be -0."""
    torch_prune.remove(module, name)
    parameter = getattr(module, name)
    with torch.no_grad():
        parameter.masked_fill_(~mask.to(parameter.device), 0.0)
