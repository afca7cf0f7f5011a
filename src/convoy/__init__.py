"""Convoy makes convolutional networks run faster on the machine they are on, and says why.

The public API is what is named here; it is imported on first use, so that `import convoy` does not import torch.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

from convoy._version import __version__
from convoy.collection_pause import collection_paused
from convoy.errors import (
    ConvoyError,
    InputError,
    InternalError,
    PackageError,
    PlanError,
    SelectionError,
    UnsupportedError,
)
from convoy.settings import Check, Effort, LayoutChoice, Numerics, Settings, Solver

if TYPE_CHECKING:
    # From the modules that define them: `convoy.pipeline.optimize` is a module too, and mypy takes a name for the module.
    from convoy.functional import conv2d as conv2d
    from convoy.functional import engines as engines
    from convoy.package.export import export as export
    from convoy.package.opening import open as open  # noqa: A004
    from convoy.package.packaged_module import PackagedModule as PackagedModule
    from convoy.pipeline.optimize import optimize as optimize
    from convoy.pipeline.replay.load import load as load
    from convoy.program.optimized_module import OptimizedModule as OptimizedModule
    from convoy.training.step import TrainingStep as TrainingStep
    from convoy.training.tune_step import training_step as training_step

_LAZY = {
    "OptimizedModule": "convoy.program",
    "PackagedModule": "convoy.package.packaged_module",
    "TrainingStep": "convoy.training.step",
    "conv2d": "convoy.functional",
    "export": "convoy.package.export",
    "load": "convoy.pipeline",
    "open": "convoy.package.opening",
    "optimize": "convoy.pipeline",
    "training_step": "convoy.training",
}
"""Public name → the module that it is imported from on first use."""

__all__ = [
    "Check",
    "ConvoyError",
    "Effort",
    "InputError",
    "InternalError",
    "LayoutChoice",
    "Numerics",
    "OptimizedModule",
    "PackageError",
    "PackagedModule",
    "PlanError",
    "SelectionError",
    "Settings",
    "Solver",
    "TrainingStep",
    "UnsupportedError",
    "__version__",
    "conv2d",
    "engines",
    "export",
    "load",
    "open",
    "optimize",
    "training_step",
]


if not TYPE_CHECKING:  # else every misspelt name would pass for one of the package

    def __getattr__(name: str) -> Any:
        if name == "engines":  # a package that can be called, so that it is the same thing before and after its import
            return importlib.import_module("convoy.engines")
        if name in _LAZY:
            state = random.getstate()  # parts of torch draw numbers when they are first imported
            try:
                with collection_paused():  # modules are no garbage, and a full collection visits all of PyTorch
                    return getattr(importlib.import_module(_LAZY[name]), name)
            finally:
                random.setstate(state)
        raise AttributeError(f"module 'convoy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
