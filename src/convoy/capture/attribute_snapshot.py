"""AttributeSnapshot: what a module's attributes hold, to find out whether a run of it changed any."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.typed_torch import named_modules

_PLAIN: Final = (bool, int, float, str, type(None))
_CONTAINERS: Final = cast("tuple[type[Any], ...]", (list, dict, set, tuple))


class AttributeSnapshot:
    """The numbers, strings and tensors in a module's attributes, containers included, as they are now.

    Args:
        model: looked at with all modules inside it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before, self._held = _contents(model)

    def has_changed(self) -> bool:
        """Whether an attribute has another value now, or a tensor was written or replaced."""
        return _contents(self._model)[0] != self._before


def _contents(model: nn.Module) -> tuple[dict[tuple[str, str], object], list[object]]:
    """Attributes by module and name, and the objects in them, which are compared by identity while they are held."""
    found: dict[tuple[str, str], object] = {}
    held: list[object] = []
    for path, module in named_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, (*_PLAIN, torch.Tensor)):
                found[path, name] = _mark(value)
                held.append(value)
            elif isinstance(value, _CONTAINERS) and not value:  # most modules hold ten empty dicts of hooks
                found[path, name] = type(value)
            elif isinstance(value, _CONTAINERS):
                items: Any = [*value] if isinstance(value, set) else value
                leaves, nesting = pytree.tree_flatten(items)
                found[path, name] = (nesting, *map(_mark, leaves))
                held += leaves
    return found, held


def _mark(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (id(value), value._version)
    return value if isinstance(value, _PLAIN) else id(value)
