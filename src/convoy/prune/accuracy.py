"""Accuracy of a classifier on labelled images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import nn

from convoy.capture.export import evaluation_mode
from convoy.errors import InputError

Progress = Callable[[str, int, int], None]
"""Called with a message, the number done, and the total."""


class LabelledImages(Protocol):
    """The part of a data set that `accuracy` needs; `convoy.zoo.Dataset` provides it."""

    def __len__(self) -> int: ...

    def batches(self, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """x, fp32 [b, 3, h, w], and y, int64 [b]."""
        ...


def accuracy(
    model: nn.Module, images: LabelledImages, *, batch: int = 128, on_progress: Progress | None = None
) -> float:
    """Share of the images, 0..1, whose highest class score is that of their label, with the model in evaluation mode."""
    device = next(model.parameters()).device
    right = seen = 0
    with torch.no_grad(), evaluation_mode(model):
        for x, y in images.batches(batch):
            if on_progress is not None:
                on_progress("accuracy", seen, len(images))
            right += int((class_scores(model(x.to(device))).argmax(1).cpu() == y).sum())
            seen += len(y)
    return right / seen


def class_scores(outputs: object) -> torch.Tensor:
    """A model's scores [n, classes]: its output, or the first of several; raises InputError for anything else."""
    while isinstance(outputs, (tuple, list)) and outputs:
        outputs = cast("Sequence[object]", outputs)[0]
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 2:
        return outputs
    shown = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(cast("object", outputs)).__name__
    raise InputError("model", shown, "outputs [n, classes], as a classifier has them")
