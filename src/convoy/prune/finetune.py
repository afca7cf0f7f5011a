"""A short fine-tune that keeps masks, and accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy.capture.export import evaluation_mode
from convoy.errors import ConvoyError, InputError
from convoy.prune.masks import masked

Progress = Callable[[str, int, int], None]
"""Told what happens: message, how much is done, how much there is."""


class LabelledImages(Protocol):
    """What fine-tuning and accuracy want of a data set: `convoy.zoo.Dataset` has it."""

    def __len__(self) -> int: ...

    def batch_count(self, batch: int, *, drop_last: bool = False) -> int:
        """Batches of one pass."""
        ...

    def batches(
        self, batch: int, *, seed: int | None = None, augment: bool = False, drop_last: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """x, fp32 [b, 3, h, w], and y, int64 [b]."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """How to fine-tune: stochastic gradient descent with momentum, the rate falling to 0 along half a cosine.

    The default rate is a tenth of what residual nets are trained with from the start, for the weights are nearly right.
    """

    epochs: int = 1
    batch: int = 128
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0
    augment: bool = True

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 2)):  # a batch norm wants two values of a channel
            if getattr(self, name) < least:
                raise InputError(name, getattr(self, name), f"an integer of at least {least}")
        if not 0 < self.lr < float("inf"):
            raise InputError("lr", self.lr, "a positive number")


def finetune(
    model: nn.Module,
    masks: Mapping[str, torch.Tensor],
    images: LabelledImages,
    schedule: Schedule,
    on_progress: Progress | None = None,
) -> list[float]:
    """Train a pruned model on, what is pruned staying pruned; the mean loss of each epoch.

    The model's own training flags are put back. The same seed gives the same weights, as far as the device's kernels give
    the same bits (on a CPU: with as many threads).

    Args:
        model: changed in place; on its device.
        masks: by parameter name; see `masked`.
        images: what to train on; labels lie below the model's number of outputs.
        schedule: how.
        on_progress: told of each step.

    Raises:
        InputError: a single image.
        ConvoyError: the loss became NaN or infinite; the weights are no use then.
    """
    if len(images) < 2:
        raise InputError("data", f"{len(images)} images", "at least 2 to train on")
    device = next(model.parameters()).device
    batch = min(schedule.batch, len(images))
    steps = images.batch_count(batch, drop_last=True)
    losses: list[float] = []
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), evaluation_mode(model), masked(model, masks):
        torch.manual_seed(schedule.seed)  # dropout
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad],
            lr=schedule.lr,
            momentum=schedule.momentum,
            weight_decay=schedule.weight_decay,
        )
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, schedule.epochs * steps)
        model.train()
        for epoch in range(schedule.epochs):
            seed = schedule.seed * 100_003 + epoch
            passed = torch.zeros((), device=device)
            batches = images.batches(batch, seed=seed, augment=schedule.augment, drop_last=True)
            for step, (x, y) in enumerate(batches):
                if on_progress is not None:
                    on_progress(f"fine-tuning, epoch {epoch + 1}", epoch * steps + step, schedule.epochs * steps)
                optimizer.zero_grad(set_to_none=True)
                loss = cross_entropy(class_scores(model(x.to(device))), y.to(device))
                loss.backward()
                optimizer.step()
                cosine.step()
                passed += loss.detach()
            losses.append(float(passed) / steps)
            if not torch.isfinite(passed):
                raise ConvoyError(
                    f"the loss is {losses[-1]} in epoch {epoch + 1}: a lower --lr than {schedule.lr:g} may help"
                )
        optimizer.zero_grad(set_to_none=True)
    return losses


def accuracy(
    model: nn.Module, images: LabelledImages, *, batch: int = 128, on_progress: Progress | None = None
) -> float:
    """Share of images whose largest output is at their label, in evaluation mode."""
    device = next(model.parameters()).device
    right = seen = 0
    with torch.no_grad(), evaluation_mode(model):
        for x, y in images.batches(batch):
            if on_progress is not None:
                on_progress("accuracy", seen, len(images))
            right += int((class_scores(model(x.to(device))).argmax(1).cpu() == y).sum())
            seen += len(y)
    return right / seen


def class_scores(outputs: Any) -> torch.Tensor:
    """A model's scores [n, classes]: its output, or the first of several; raises InputError for anything else."""
    while isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2:
        shown = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise InputError("model", shown, "outputs [n, classes], as a classifier has them")
    return outputs
