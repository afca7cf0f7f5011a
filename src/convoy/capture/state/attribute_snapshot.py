"""AttributeSnapshot: what a module's attributes hold, to find out whether a run of it changed any."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.typed_torch import named_modules

_PLAIN: Final = (bool, int, float, str, type(None))
_CONTAINERS: Final = cast("tuple[type[Any], ...]", (list, dict, set, tuple, deque))
_DEPTH: Final = 3
"""Objects inside an attribute's object that are looked into, such as `self.config.state`."""


class AttributeSnapshot:
    """The numbers, strings and tensors in a module's attributes as they are now, in containers and plain objects too.

    Args:
        model: looked at with all modules inside it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before, self._held = _contents(model)

    def has_changed(self) -> bool:
        """Whether an attribute has another value now, or a tensor was written or replaced."""
        return _contents(self._model)[0] != self._before

    def changed(self) -> list[str]:
        """The attributes that have another value now, as `module.attribute`."""
        now = _contents(self._model)[0]
        keys = dict.fromkeys((*self._before, *now))
        return [".".join(filter(None, key)) for key in keys if (self._before.get(key),) != (now.get(key),)]


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
            else:
                found[path, name] = _mark_inside(value, held, _DEPTH)
    return found, held


def _mark_inside(value: object, held: list[object], depth: int) -> object:
    """The mark of a container with its items, of a plain object with its attributes."""
    held.append(value)
    if isinstance(value, _CONTAINERS) and depth:
        items: Any = value
        leaves, nesting = pytree.tree_flatten([*items] if isinstance(value, set) else items)
        if any(leaf is items for leaf in leaves):  # of a class that pytree does not know
            leaves = [*items.items()] if isinstance(value, dict) else [*items]
        return (nesting, *_marks_of(leaves, held, depth - 1))
    if depth and _is_plain_object(value):
        return (id(value), *vars(value), *_marks_of(vars(value).values(), held, depth - 1))
    return _mark(value)


def _marks_of(values: Iterable[object], held: list[object], depth: int) -> list[object]:
    return [_mark_inside(value, held, depth) for value in values]


def _is_plain_object(value: object) -> bool:
    """Whether attributes of an object are its state: not for tensors, modules, functions and classes."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (torch.Tensor, nn.Module, type, types.ModuleType))
        and not callable(value)
    )


def _mark(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (id(value), 0 if value.is_inference() else value._version)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return (id(value), hash(cast("Any", value).tobytes()))
    return value if isinstance(value, _PLAIN) else id(value)
