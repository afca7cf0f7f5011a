"""Hooks on modules that a program would not call: all but those of torch's own that compute weights."""

from __future__ import annotations

from typing import Final

from torch import nn
from torch.nn.modules import module as nn_module

from convoy.typed_torch import named_modules

_TORCHS_OWN: Final = ("torch.nn.utils.", "torch.nn.modules.", "torch.export.", "torch._export.", "convoy.zoo.pt2.")
"""Modules of hooks that are captured with the model: they compute weights, or check the shapes of arguments."""

_FORWARD: Final = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}
_BACKWARD: Final = {"_backward_pre_hooks": "backward pre-hook", "_backward_hooks": "backward hook"}


def user_hook(model: nn.Module, *, backward: bool = False) -> str:
    """The first hook that is not torch's own, in words; empty where there is none.

    A program runs kernels and no modules: it would not call them. Those of `torch.nn.utils` (`weight_norm`, `prune`, ...) compute
    weights, and are captured with the model.

    Args:
        model: a module, looked at with all inside it.
        backward: whether hooks of the backward pass count too.
    """
    kinds = _FORWARD | _BACKWARD if backward else _FORWARD
    for name, module in named_modules(model):
        what = own_user_hook(module, backward=backward)
        if what:
            return f"{name or 'the model'} ({type(module).__name__}) has a {what}"
    if any(getattr(nn_module, f"_global{kind}", {}) for kind in kinds):
        return "torch.nn.modules.module holds a hook for all modules"
    return ""


def own_user_hook(module: nn.Module, *, backward: bool = False) -> str:
    """The kind of the first such hook of this module alone; empty where it has none."""
    for kind, what in (_FORWARD | _BACKWARD if backward else _FORWARD).items():
        hooks: dict[int, object] = vars(module).get(kind) or {}
        if any(map(_is_foreign, hooks.values())):
            return what
    return ""


def _is_foreign(hook: object) -> bool:
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return not str(where).startswith(_TORCHS_OWN)
