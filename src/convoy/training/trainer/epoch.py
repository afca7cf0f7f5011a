"""The results that `fit` gives: where a training begins, and each pass over the images."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpochResult:
    """What one pass gave.

    Attributes:
        number: from 1.
        loss: mean over its steps, of this process.
        accuracy: share of the test images that are right; None without such.
        images_per_s: of all processes, reading included, the first step (which builds and captures) left out.
        steps: steps made, in this process.
        lr: learning rate of its last update.
    """

    number: int
    loss: float
    accuracy: float | None
    images_per_s: float
    steps: int
    lr: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingStart:
    """Where a training begins.

    Attributes:
        epochs_done: epochs that the checkpoint holds; 0 for a new training.
        step: steps of the next epoch that it holds.
        steps: of each epoch.
        epochs: of the whole training.
        lr: learning rate of the next update.
        is_resumed: whether there was a checkpoint.
    """

    epochs_done: int
    step: int
    steps: int
    epochs: int
    lr: float
    is_resumed: bool
