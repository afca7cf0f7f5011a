"""The arguments of `optimize` and `load`: refused by name where they are of a kind that cannot be used."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import nn

from convoy.errors import InputError
from convoy.program import OptimizedModule
from convoy.typed_torch import named_modules
from convoy.user_warning import warn_user

_MOST_NAMED: Final = 3
"""Modules that a warning names."""


def checked_model(model: Any) -> nn.Module:
    """The module to be tuned: inside `torch.compile`'s wrapper or one of our own, the user's.

    Raises:
        InputError: not a module.
    """
    if isinstance(model, str):
        raise InputError("model", model, "a torch.nn.Module", "Load it first, e.g. torchvision.models.get_model(name).")
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError("model", model.__name__, "a torch.nn.Module, not its class", "Make an instance of it.")
    if not isinstance(model, nn.Module):
        given = cast("Any", model)
        what = str(getattr(given, "__name__", None) or type(given).__name__)
        todo = "Put the function into a module's forward." if callable(given) else ""
        if isinstance(given, torch.export.ExportedProgram):
            todo = "Give the program's .module()."
        raise InputError("model", what, "a torch.nn.Module", todo)
    if isinstance(model, OptimizedModule):
        return model.stock
    if not hasattr(model, "training"):
        todo = "Give the module before torch.jit.freeze or torch.jit.optimize_for_inference."
        raise InputError("model", type(model).__name__, "a torch.nn.Module with a training flag", todo)
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else model


def checked_name(name: Any, model: nn.Module) -> str:
    """What to call a model: its class's name where none is given.

    Raises:
        InputError: no string.
    """
    if not isinstance(name, str):
        raise InputError("name", name, "a string")
    return name or type(model).__name__


def warn_of_training_parts(model: Any) -> None:
    """Warn of a dropout or batch norm in training mode inside a model in evaluation mode: PyTorch computes something else.

    A model that is in training mode as a whole gets no warning: `optimize` is documented to compute evaluation.
    """
    if not isinstance(model, nn.Module) or getattr(model, "training", True):
        return
    found = [name for name, module in named_modules(model) if module.training and _depends_on_mode(module)]
    if found:
        names = ", ".join(found[:_MOST_NAMED]) + (", ..." if len(found) > _MOST_NAMED else "")
        warn_user(
            f"parts of the model are in training mode ({names}), the model in evaluation mode: the program computes evaluation "
            "everywhere; to keep training mode there, pass training=True to the function (F.dropout, F.batch_norm) in forward"
        )


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether a module's own forward reads its training flag, to some effect."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)):
        return module.running_mean is not None
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return code is not None and "training" in code.co_names
