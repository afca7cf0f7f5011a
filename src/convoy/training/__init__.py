"""Training: a step captured whole and tuned, and the trainer that runs it epoch by epoch (docs/how-to/train.md)."""

from __future__ import annotations

from convoy.training.training_job import TrainingResult
from convoy.training.tune_step import training_step, tune_training_step

__all__ = ["TrainingResult", "training_step", "tune_training_step"]
