"""Convoy makes convolutional networks run faster on the machine they are on, and says why.

The public API is what is named here; it is imported on first use, so that `import convoy` does not import torch.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

from convoy._version import __version__
from convoy.errors import ConvoyError, InputError, PlanError, UnsupportedError
from convoy.settings import Effort, LayoutChoice, Numerics, Settings, Solver

if TYPE_CHECKING:
    from convoy.functional import conv2d as conv2d
    from convoy.functional import engines as engines
    from convoy.pipeline import load as load
    from convoy.pipeline import optimize as optimize
    from convoy.training import training_step as training_step

_LAZY = {
    "optimize": "convoy.pipeline",
    "load": "convoy.pipeline",
    "conv2d": "convoy.functional",
    "training_step": "convoy.training",
}

__all__ = [
    "ConvoyError",
    "Effort",
    "InputError",
    "LayoutChoice",
    "Numerics",
    "PlanError",
    "Settings",
    "Solver",
    "UnsupportedError",
    "__version__",
    "conv2d",
    "engines",
    "load",
    "optimize",
    "training_step",
]


def __getattr__(name: str) -> Any:
    if name == "engines":  # a package that can be called, so that it is the same thing before and after its import
        return importlib.import_module("convoy.engines")
    if name in _LAZY:
        state = random.getstate()  # parts of torch draw numbers when they are first imported
        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        finally:
            random.setstate(state)
    raise AttributeError(f"module 'convoy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
