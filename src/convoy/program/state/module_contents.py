"""ModuleContents: every module, container and tensor that a module holds, found by one walk."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, cast

import torch
from torch import nn

from convoy.program.calls import is_plain
from convoy.typed_torch import is_functorch_wrapped

MOST_ITEMS: Final = 10_000
"""A longer list, dict or set in an attribute is compared by identity, not by its items."""

DEEPEST: Final = 6
"""Levels of nested lists, dicts, sets and tuples that are looked into."""
_OWN: Final = frozenset(nn.Module().__dict__) - {"training"}
"""What every module's `__dict__` holds; the dicts among them that matter are compared one by one."""

# With these types, a checker narrows a value to Any after `isinstance`, not to a container of unknown items.
_DICT: Final[type[Any]] = dict
_TUPLE: Final[type[Any]] = tuple
_INDEXED: Final = cast("tuple[type[Any], ...]", (dict, list))
_CONTAINERS: Final = cast("tuple[type[Any], ...]", (dict, list, set, deque, tuple))

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


class ModuleContents:
    """What a walk through a module finds, each once: containers with their paths, modules with their names, tensors."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.containers: list[Container] = []
        self.paths: list[str] = []
        self.empty: list[Container] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.held: list[tuple[Any, Any, torch.Tensor]] = []
        self._seen: set[int] = set()

    def add(self, value: Any, path: str, depth: int) -> None:
        """Look into a value: a tensor, a module, a container of such; anything else is compared where it is held."""
        if isinstance(value, torch.Tensor):
            self.tensors.append((path, value))
        elif isinstance(value, nn.Module):
            self._add_module(value, path)
        elif isinstance(value, _CONTAINERS) and depth < DEEPEST and len(value) <= MOST_ITEMS:
            self._add_container(value, path, depth)

    def _add_module(self, module: nn.Module, path: str) -> None:
        if self._is_new(module):
            self.modules.append(module)
            self.names.append(path)
            own = vars(module)
            self.containers.append(own)
            self.paths.append(path)
            for kind in ("_parameters", "_buffers", "_modules"):
                part = cast("Any", own.get(kind))
                if isinstance(part, _DICT):
                    if part:
                        self._add_container(part, path, 0)
                    else:
                        self.empty.append(part)
            for name, value in list(own.items()):
                if name not in _OWN:
                    self._add_item(own, name, value, path, 0)

    def _add_container(self, container: Any, path: str, depth: int) -> None:
        if self._is_new(container):
            if not isinstance(container, _TUPLE):
                self.containers.append(container)
                self.paths.append(path)
            pairs = container.items() if isinstance(container, _DICT) else enumerate(container)
            for key, value in cast("list[tuple[Any, Any]]", list(pairs)):
                self._add_item(container, key, value, path, depth)

    def _add_item(self, container: Any, key: Any, value: object, path: str, depth: int) -> None:
        if isinstance(value, torch.Tensor) and isinstance(container, _INDEXED):
            self.held.append((container, key, value))
        self.add(value, joined(path, key), depth + 1)

    def _is_new(self, value: object) -> bool:
        new = id(value) not in self._seen
        self._seen.add(id(value))
        return new


def has_pointer(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory, whose address says where its values lie; one that `torch.func` has wrapped is not."""
    return is_plain(tensor) and not is_functorch_wrapped(tensor)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor gets its shape with the first call."""
    return isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))


def joined(path: str, key: object) -> str:
    """The path of an item that a container holds at a key."""
    name = str(key) if isinstance(key, (str, int)) else "..."
    return f"{path}.{name}" if path else name
