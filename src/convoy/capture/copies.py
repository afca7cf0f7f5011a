"""Deep copies of modules, of those too whose tensors are computed, as torch.nn.utils.prune and weight_norm leave them."""

from __future__ import annotations

import copy

import torch
from torch import nn


def copy_module(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A deep copy. Attributes that are computed tensors, which `copy.deepcopy` refuses, are copied without their history.

    A pruned module's `weight` is such a one: computed of `weight_orig` and `weight_mask` before every call, in the copy too.

    Args:
        model: what to copy.
        device: where the copy's tensors are made, without one on the model's own device; None: each beside its original.
    """

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device or tensor.device, copy=True)

    computed = (t for module in model.modules() for t in vars(module).values() if isinstance(t, torch.Tensor))
    made: dict[int, torch.Tensor] = {id(t): copied(t) for t in computed if not t.is_leaf}
    if device is not None:
        made |= {id(p): nn.Parameter(copied(p), p.requires_grad) for p in model.parameters()}
        made |= {id(b): copied(b) for b in model.buffers()}
    return copy.deepcopy(model, made)
