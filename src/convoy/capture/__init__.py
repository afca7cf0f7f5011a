"""From torch to a graph: export, lowering of ATen operators, and the rewrites that every engine profits from."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from convoy.capture.captured import Captured, captured_function, to_double

if TYPE_CHECKING:
    from convoy.capture.aot_graph import capture_traced as capture_traced
    from convoy.capture.inference import capture_inference as capture_inference
    from convoy.capture.inference import capture_with_original as capture_with_original
    from convoy.capture.training import TrainingCapture as TrainingCapture
    from convoy.capture.training import capture_training as capture_training

__all__ = [
    "Captured",
    "TrainingCapture",
    "capture_inference",
    "capture_traced",
    "capture_training",
    "capture_with_original",
    "captured_function",
    "to_double",
]

_LAZY: Final = {
    "capture_inference": "convoy.capture.inference",
    "capture_traced": "convoy.capture.aot_graph",
    "capture_with_original": "convoy.capture.inference",
    "TrainingCapture": "convoy.capture.training",
    "capture_training": "convoy.capture.training",
}
"""Names that not every session uses, and where they are defined: a package captures nothing, inference runs no AOTAutograd."""


if not TYPE_CHECKING:  # else every misspelt name would pass for one of the package

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
