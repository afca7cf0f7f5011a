"""The stages wired together; reads like the figure in docs/architecture.md."""

from __future__ import annotations

from convoy.pipeline.dynamo import dynamo_backend
from convoy.pipeline.optimize import Result, load, optimize, optimize_model
from convoy.pipeline.training import train_model, training_step
from convoy.pipeline.training_job import TrainingResult

__all__ = [
    "Result",
    "TrainingResult",
    "dynamo_backend",
    "load",
    "optimize",
    "optimize_model",
    "train_model",
    "training_step",
]
