"""The last layer of a classifier, its head: replaced by one with as many outputs as there are classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from convoy.errors import InputError
from convoy.narrowing import is_sequence
from convoy.typed_torch import named_modules, seeded_rng

HEADS: Final = (nn.Linear, nn.Conv2d)
"""Layers that a classifier may end with; SqueezeNet ends with a convolution."""

SEED: Final = 0
"""Of a new layer's weights."""


def fit_head(model: nn.Module, classes: int, args: tuple[Any, ...], outputs: int) -> str:
    """Replace the last layer of a classifier, in place, by a new one with PyTorch's own initialisation for its kind.

    Args:
        model: a classifier in evaluation mode; it is run on `args` to see that the result is right.
        classes: outputs of the new layer.
        args: example inputs.
        outputs: number of outputs that it has now.

    Returns:
        Name of the layer; several names, separated by commas, where the net averages several heads.

    Raises:
        InputError: naming `head`: no layer of the model can be replaced so.
    """
    found = [n for n, m in named_modules(model) if isinstance(m, HEADS) and _outputs(m) == outputs]
    for names in (found[-1:], found) if len(found) > 1 else (found,):
        if names and _replaced(model, dict.fromkeys(names, classes), args, classes):
            return ", ".join(names)
    expected = f"fit, with a net whose last layer is linear or a convolution with its {outputs} outputs"
    todo = f"Give a net that has {classes} outputs: FILE.py:FACTORY."
    raise InputError("head", "fit", expected, todo)


def fit_heads_to(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Give layers as many outputs as tensors of a state dict have, where only these numbers differ; in place."""
    for name, module in list(named_modules(model)):
        weight = state.get(f"{name}.weight")
        if not isinstance(module, HEADS) or weight is None or weight.shape == module.weight.shape:
            continue
        if weight.dim() == module.weight.dim() and weight.shape[1:] == module.weight.shape[1:]:
            _put(model, name, _resized(module, int(weight.shape[0])))


def _replaced(model: nn.Module, sizes: Mapping[str, int], args: tuple[Any, ...], classes: int) -> bool:
    """Replace layers; if the model does not give so many outputs then, put them back."""
    before = {name: model.get_submodule(name) for name in sizes}
    for name, outputs in sizes.items():
        _put(model, name, _resized(before[name], outputs))
    try:
        with torch.no_grad():
            result: Any = model(*args)
        while is_sequence(result) and result:
            result = result[0]
        if isinstance(result, torch.Tensor) and result.shape[1:] == (classes,):
            return True
    except Exception:  # noqa: S110 - a user's own net may fail in any way with another head
        pass
    for name, module in before.items():
        _put(model, name, module)
    return False


def _outputs(module: nn.Module) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)  # pyright: ignore[reportArgumentType]


def _resized(module: nn.Module, outputs: int) -> nn.Module:
    """A new layer like another one but for its number of outputs, on its device, in its dtype; hooks do not come along.

    It is drawn on the CPU with a seed of its own: the same for every device, and nobody else's random numbers change.
    """
    old: Any = module
    bias = old.bias is not None
    with seeded_rng(SEED):
        if isinstance(module, nn.Linear):
            new: nn.Module = nn.Linear(module.in_features, outputs, bias)
        else:
            words = {n: getattr(old, n) for n in ("stride", "padding", "dilation", "groups", "padding_mode")}
            new = nn.Conv2d(old.in_channels, outputs, old.kernel_size, bias=bias, **words)
    return new.to(old.weight.device, old.weight.dtype).train(module.training)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, own, module)
