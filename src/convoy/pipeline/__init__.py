"""The stages wired together; reads like the figure in docs/concepts/architecture.md."""

from __future__ import annotations

from convoy.pipeline.optimize import OptimizeResult, optimize, optimize_model
from convoy.pipeline.replay.load import load

__all__ = ["OptimizeResult", "load", "optimize", "optimize_model"]
