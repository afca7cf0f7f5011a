"""Hooks on modules that a graph cannot call: all but those by which `torch.nn.utils` computes a weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import nn
from torch.nn.modules import module as nn_module

_KINDS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_KINDS: Final = tuple(f"_global{kind}" for kind in _KINDS)


def foreign_hook(module: nn.Module) -> str:
    """Where a module or one inside it has a hook of the user's, in words; empty where none has one."""
    for name, inner in module.named_modules():
        if has_foreign_hook(inner):
            return f"{type(inner).__name__} {name.removeprefix('model.')!r} has hooks"
    return ""


def has_foreign_hook(module: nn.Module) -> bool:
    """Whether this module itself has a forward or backward hook of the user's."""
    return any(_is_foreign(hook) for kind in _KINDS for hook in (getattr(module, kind, None) or {}).values())


def has_global_hook() -> bool:
    """Whether a hook is registered for all modules (`register_module_forward_hook` and its like)."""
    return any(True for _ in _global_hooks())


def _global_hooks() -> Iterator[Any]:
    for kind in _GLOBAL_KINDS:
        yield from (getattr(nn_module, kind, None) or {}).values()


def _is_foreign(hook: object) -> bool:
    """Whether a hook is none of those that `weight_norm`, `spectral_norm` and `prune` register to compute a weight."""
    return not str(getattr(hook, "__module__", "")).startswith("torch.nn.utils.")
