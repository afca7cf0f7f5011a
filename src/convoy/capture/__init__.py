"""From torch to a graph: export, lowering of ATen operators, and the rewrites that every engine profits from."""

from __future__ import annotations

from convoy.capture.aot_graph import capture_traced
from convoy.capture.captured import Captured, captured_function, to_double
from convoy.capture.inference import capture_inference, capture_with_original
from convoy.capture.training import TrainingCapture, capture_training

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
