"""From a PyTorch model to a graph and its constants."""

from __future__ import annotations

from convoy.capture.captured import Captured
from convoy.capture.inference import capture_inference
from convoy.capture.modules import find_modules

__all__ = ["Captured", "capture_inference", "find_modules"]
