"""find_modules: the layers of a model that cannot be captured whole, with the arguments that each is called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from convoy.capture.export import evaluation_mode
from convoy.typed_torch import named_modules

FoundModule = tuple[str, nn.Module, tuple[torch.Tensor, ...]]
"""(qualified name, module, example arguments)."""


def find_modules(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[FoundModule]:
    """Run a model once and list its Conv2d and Linear layers with what they were called with, in call order.

    Left out are layers that were not called, those called with several shapes or dtypes (each would want a plan of its own),
    and the model itself. A layer with several names has the first of them.

    Args:
        model: left as it was, training flags included.
        args: example positional arguments.
        kwargs: example keyword arguments.

    Returns:
        (qualified name, module, its arguments) for each; arguments in the memory format in which they came.
    """
    called: dict[str, list[torch.Tensor]] = {}
    layers = {name: m for name, m in named_modules(model) if name and isinstance(m, (nn.Conv2d, nn.Linear))}
    handles = [layer.register_forward_pre_hook(_listener(name, called)) for name, layer in layers.items()]
    try:
        with evaluation_mode(model), torch.no_grad():
            model(*args, **(kwargs or {}))
    finally:
        for handle in handles:
            handle.remove()
    one_shape = [name for name, given in called.items() if len({(x.shape, x.dtype) for x in given}) == 1]
    return [(name, layers[name], (called[name][0],)) for name in one_shape]


def _listener(name: str, called: dict[str, list[torch.Tensor]]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        if len(given) == 1 and isinstance(given[0], torch.Tensor):
            called.setdefault(name, []).append(given[0].detach())

    return note
