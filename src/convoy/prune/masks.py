"""Masks on parameters: torch.nn.utils.prune applies them during training; at the end the pruned weights become zeros."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import prune

from convoy.typed_torch import named_modules

_torch_prune = cast("Any", prune)  # its functions declare no types


def bake_masks(model: nn.Module) -> list[str]:
    """Replace the masks that torch.nn.utils.prune left on a model by zeros in the weights.

    Returns:
        Names of the parameters that had a mask.
    """
    found: list[str] = []
    for path, module in named_modules(model):
        for name in [n.removesuffix("_mask") for n, _ in module.named_buffers(recurse=False) if n.endswith("_mask")]:
            if hasattr(module, f"{name}_orig"):
                _settle(module, name, getattr(module, f"{name}_mask").bool())
                found.append(f"{path}.{name}" if path else name)
    return found


@contextmanager
def masked(model: nn.Module, masks: Mapping[str, torch.Tensor]) -> Generator[None]:
    """Hold parameters at zero where their masks are False, for training inside the context; afterwards those are zeros.

    Inside, a parameter `weight` becomes the parameter `weight_orig` and the buffer `weight_mask`. Before each forward pass
    their product is computed, so pruned weights get no gradient.

    Args:
        model: changed in place.
        masks: by parameter name (`layer1.0.conv1.weight`), bool, of the parameter's shape. A parameter that
            several modules share has one entry for each module.
    """
    places = [(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], m) for path, m in masks.items()]
    for module, name, mask in places:
        _torch_prune.custom_from_mask(module, name, mask)
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
    """Make a masked parameter plain again, with +0 where it is pruned; the product with the mask may have left -0."""
    _torch_prune.remove(module, name)
    parameter = getattr(module, name)
    with torch.no_grad():
        parameter.masked_fill_(~mask.to(parameter.device), 0.0)
