"""What to optimise in a model that cannot be exported: its convolutions and linear layers, one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def find_modules(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> list[tuple[str, nn.Module, tuple[torch.Tensor, ...]]]:
    """Run the model once and note the Conv2d and Linear modules that were called, in call order, with their inputs.

    A module that is called with several shapes is left out: it would need a plan for each.

    Returns:
        (qualified name, module, its arguments) for each.
    """
    seen: dict[str, tuple[nn.Module, list[tuple[torch.Tensor, ...]]]] = {}
    handles = []
    for name, module in model.named_modules():
        if type(module) in (nn.Conv2d, nn.Linear) and name:
            calls: list[tuple[torch.Tensor, ...]] = []
            seen[name] = (module, calls)
            handles.append(module.register_forward_pre_hook(lambda _, given, calls=calls: calls.append(given)))
    try:
        with torch.no_grad():
            model(*args, **(kwargs or {}))
    finally:
        for handle in handles:
            handle.remove()
    return [
        (name, module, calls[0])
        for name, (module, calls) in seen.items()
        if calls and len({tuple(t.shape for t in given) for given in calls}) == 1
    ]
