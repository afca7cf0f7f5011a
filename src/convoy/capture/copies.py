"""Deep copies of modules, of those too whose tensors are computed, as torch.nn.utils.prune and weight_norm leave them."""

from __future__ import annotations

import copy

import torch
from torch import nn


def copy_module(model: nn.Module) -> nn.Module:
    """A deep copy. Attributes that are computed tensors, which `copy.deepcopy` refuses, are copied without their history.

    A pruned module's `weight` is such a one: computed of `weight_orig` and `weight_mask` before every call, in the copy too.
    """
    computed = (t for module in model.modules() for t in vars(module).values() if isinstance(t, torch.Tensor))
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in computed if not t.is_leaf})
