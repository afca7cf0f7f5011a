"""CallLeftovers: attributes that the model's own calls write. A call of the stock module that writes them is no change."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import nn

from convoy.typed_torch import named_modules

_OWN: Final = frozenset(vars(nn.Module()))
"""What every module's `__dict__` holds: parameters, buffers, submodules, hooks, flags. A call's cache is none of these."""

_CONTAINERS: Final = cast("tuple[type[Any], ...]", (list, tuple, dict, set, deque))
_DEEPEST: Final = 6
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class CallLeftovers:
    """Attributes that calls change, by `module.attribute`.

    Attributes:
        filled: attributes that the first call fills and later calls leave alone, such as a grid that is made once, with the
            value that it leaves.
        overwritten: attributes that every call writes, and none reads before: whatever they hold, results are the same.
    """

    filled: Mapping[str, object] = field(default_factory=dict[str, object])
    overwritten: frozenset[str] = frozenset()

    def explain(self, path: str, modules: Mapping[str, nn.Module]) -> bool:
        """Whether a call of the model explains the present value of an attribute, or of a container in it.

        Args:
            path: the attribute's qualified name, with the keys of containers behind it.
            modules: the modules now, by qualified name.
        """
        for name in self.overwritten:
            if _is_within(path, name):
                return True
        for name, value in self.filled.items():
            if _is_within(path, name):
                owner, _, attribute = name.rpartition(".")
                return owner in modules and same_value(vars(modules[owner]).get(attribute, _MISSING), value)
        return False


def values_at(model: nn.Module, names: Sequence[str]) -> dict[str, object]:
    """The values of attributes, by `module.attribute`; those that PyTorch gives every module are left out."""
    modules = dict(named_modules(model))
    found: dict[str, object] = {}
    for name in names:
        owner, _, attribute = name.rpartition(".")
        if attribute not in _OWN and attribute in vars(modules[owner]):
            found[name] = vars(modules[owner])[attribute]
    return found


def same_value(one: object, other: object, depth: int = 0) -> bool:
    """Whether two values are equal: tensors by dtype, device and elements, containers by items, plain objects by attributes."""
    if one is other:
        return True
    if type(one) is not type(other) or depth > _DEEPEST:
        return False
    if isinstance(one, torch.Tensor):
        return _same_tensor(one, cast("torch.Tensor", other))
    if isinstance(one, nn.Module):
        return False
    if isinstance(one, _CONTAINERS):
        return _same_items(one, other, depth)
    if _is_plain_object(one):
        return _same_items(vars(one), vars(other), depth)
    try:
        return bool(one == other)
    except Exception:  # everything: any class's own __eq__ or __bool__ may raise, as an array's does
        return False


def _is_plain_object(value: object) -> bool:
    """Whether an object's attributes are all that it holds: not of functions, nor of classes made in C such as `partial`."""
    slots = any("__slots__" in vars(kind) for kind in type(value).__mro__)
    return hasattr(value, "__dict__") and type(value).__new__ is object.__new__ and not slots


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.device, one.layout, one.shape) == (other.dtype, other.device, other.layout, other.shape)
    return alike and one.layout == torch.strided and torch.equal(one, other)


def _same_items(one: Any, other: Any, depth: int) -> bool:
    if isinstance(one, dict):
        mine = cast("dict[Any, Any]", one)
        return list(mine) == list(other) and all(same_value(mine[key], other[key], depth + 1) for key in mine)
    if isinstance(one, set):
        return one == other
    return len(one) == len(other) and all(same_value(a, b, depth + 1) for a, b in zip(one, other, strict=True))


def _is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")
