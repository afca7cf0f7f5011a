"""fit: train a classifier on labelled images with `training_step`, epoch by epoch, with checkpoints. What `convoy train` runs."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy.errors import ConvoyError, InputError
from convoy.pipeline.observer import Observer, ignore_progress
from convoy.prune.accuracy import accuracy, class_scores
from convoy.settings import Settings, checked_settings
from convoy.training.step import TrainingStep
from convoy.training.trainer.checkpoint import (
    RandomState,
    TrainingPosition,
    random_state,
    read_checkpoint,
    remove_unfinished,
    write_checkpoint,
)
from convoy.training.trainer.recipe import TrainingRecipe
from convoy.training.tune_step import training_step
from convoy.zoo import Dataset


@dataclass(frozen=True, slots=True)
class EpochResult:
    """What one pass gave.

    Attributes:
        number: from 1.
        loss: mean over its steps, of this process.
        accuracy: share of the test images that are right; None without such.
        images_per_s: of all processes, reading included, the first step (which builds and captures) left out.
        steps: steps made, in this process.
    """

    number: int
    loss: float
    accuracy: float | None
    images_per_s: float
    steps: int


def fit(
    model: nn.Module,
    images: Dataset,
    recipe: TrainingRecipe,
    *,
    settings: Settings | None = None,
    test: Dataset | None = None,
    observer: Observer | None = None,
    on_plan: Callable[[TrainingStep], None] | None = None,
) -> Iterator[EpochResult]:
    """Train a classifier; gives an `Epoch` after each pass.

    Under `torchrun`, give a model inside DistributedDataParallel, each process its own shard (`Dataset.shard`), and all of
    them one recipe: with a checkpoint, every process has a part in writing it.

    Args:
        model: on its device; trained in place.
        images: what to train on; a last batch that is not full is left out, and so are batches that fill no update.
        recipe: how.
        settings: for tuning; `Settings()` by default.
        test: images to take the accuracy on after each epoch.
        observer: told of tuning and of each step.
        on_plan: given the step when it has been tuned.

    Raises:
        InputError: fewer images than a batch, fewer batches than an update, a checkpoint of another model.
        ConvoyError: the loss became NaN or infinite.
    """
    return _Fit(model, images, recipe, checked_settings(settings), test, observer or ignore_progress, on_plan).run()


class _Fit:
    def __init__(
        self,
        model: nn.Module,
        images: Dataset,
        recipe: TrainingRecipe,
        settings: Settings,
        test: Dataset | None,
        observer: Observer,
        on_plan: Callable[[TrainingStep], None] | None,
    ) -> None:
        batches = images.batch_count(recipe.batch, drop_last=True)
        if not batches:
            raise InputError("batch", recipe.batch, f"at most the {len(images)} images that there are")
        if batches < recipe.accumulate:
            raise InputError("accumulate", recipe.accumulate, f"at most the {batches} batches of an epoch")
        # Whole updates alone: no gradient waits for the next epoch, so that its checkpoint needs none.
        self.steps = batches - batches % recipe.accumulate
        self.model, self.images, self.recipe, self.settings = model, images, recipe, settings
        self.test, self.watch, self.on_plan = test, observer, on_plan
        self.own = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.device = next(model.parameters()).device
        learning = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(
            learning, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
        self.cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, recipe.epochs * self._updates(self.steps)
        )
        self.position = TrainingPosition(0, 0)
        if recipe.resume and recipe.checkpoint is not None and recipe.checkpoint.exists():
            self.position = self._resume(recipe.checkpoint)
        self.talk: Any = None
        if recipe.checkpoint is not None:
            self.talk = _talk(model)
            if _rank() == 0:
                remove_unfinished(recipe.checkpoint)
        self.step: Callable[..., torch.Tensor] | None = None

    def run(self) -> Iterator[EpochResult]:
        """Epoch by epoch, from where the checkpoint was."""
        if self.position == TrainingPosition(0, 0):
            torch.manual_seed(self.recipe.seed)
        self.model.train()
        while self.position.epoch < self.recipe.epochs:
            yield self._epoch()

    def _epoch(self) -> EpochResult:
        recipe, start = self.recipe, self.position
        losses: list[torch.Tensor] = []
        seed = recipe.seed * 100_003 + start.epoch
        batches = self.images.batches(recipe.batch, seed=seed, augment=recipe.augment, drop_last=True, start=start.step)
        begun = time.perf_counter()
        for index, (x, y) in enumerate(itertools.islice(batches, self.steps - start.step), start.step):
            batch = (self._placed(x), y.to(self.device, non_blocking=True))
            if self.step is None:
                self.step = self._make_step(batch)
            losses.append(self.step(*batch))
            if (index + 1) % recipe.accumulate == 0:
                self.cosine.step()
            if len(losses) == 1:  # the first builds, captures, and initialises the optimizer
                self._wait()
                begun = time.perf_counter()
            self.position = TrainingPosition(start.epoch, index + 1)
            if self._due(index + 1):
                self._save()
            self.watch(f"epoch {start.epoch + 1}", index + 1, self.steps)
        self._wait()
        seconds = time.perf_counter() - begun
        loss = float(torch.stack(losses).mean()) if losses else float("nan")
        if losses and not loss < float("inf"):
            raise ConvoyError(f"the loss is {loss} in epoch {start.epoch + 1}: a lower lr than {recipe.lr:g} may help")
        self.position = TrainingPosition(start.epoch + 1, 0)
        self._save()
        right = None if self.test is None else accuracy(self.own, self.test, batch=recipe.batch)
        rate = (len(losses) - 1) * recipe.batch * _processes() / seconds if len(losses) > 1 else 0.0
        return EpochResult(start.epoch + 1, loss, right, rate, len(losses))

    def _make_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[..., torch.Tensor]:
        recipe = self.recipe
        if recipe.stock:
            return self._stock_step
        step = training_step(
            self.model,
            classification_loss,
            self.optimizer,
            batch,
            amp=recipe.amp,
            clip_grad_norm=recipe.clip_grad_norm,
            accumulate=recipe.accumulate,
            plan=recipe.plan,
            settings=self.settings,
            name=self.images.name,
        )
        if self.on_plan is not None:
            self.on_plan(step)
        self.model.train()
        return step

    def _stock_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The same step as PyTorch's users write it."""
        recipe = self.recipe
        first = self.position.step % recipe.accumulate == 0
        if first:
            self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, recipe.amp, enabled=recipe.amp is not None):
            loss = classification_loss(self.model(x), y)
        (loss / recipe.accumulate).backward()
        if (self.position.step + 1) % recipe.accumulate == 0:
            if recipe.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.own.parameters(), recipe.clip_grad_norm)
            self.optimizer.step()
        return loss.detach()

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        """On the device, in channels_last on a GPU, where PyTorch is faster in it."""
        layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        return x.to(self.device, memory_format=layout, non_blocking=True)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _due(self, done: int) -> bool:
        """Whether a checkpoint is written after so many steps of an epoch, beside the one at its end.

        It is written between two updates, where no gradients are kept: after the update in which a multiple of `every` lies.
        """
        every, accumulate = self.recipe.every, self.recipe.accumulate
        return bool(every) and done % accumulate == 0 and done % every < accumulate and done < self.steps

    def _save(self) -> None:
        """Write the state, in the first process; the others hand it their random numbers."""
        if self.recipe.checkpoint is None:
            return
        random = _gathered(random_state(self.device), self.talk)
        if _rank() == 0:
            write_checkpoint(self.recipe.checkpoint, self.own, self.optimizer, self.cosine, self.position, random)

    def _resume(self, path: Path) -> TrainingPosition:
        """Go where a checkpoint was written.

        An update that had begun there begins anew: files were once written amid updates, and `accumulate` may have changed.
        """
        spread = isinstance(self.model, nn.parallel.DistributedDataParallel)
        rank = torch.distributed.get_rank(self.model.process_group) if spread else 0
        length = self.cosine.T_max
        found = read_checkpoint(path, self.own, self.optimizer, self.cosine, self.device, rank, self.steps)
        step = found.step - found.step % self.recipe.accumulate
        position = TrainingPosition(found.epoch + 1, 0) if step == self.steps else TrainingPosition(found.epoch, step)
        made = position.epoch * self._updates(self.steps) + self._updates(position.step)
        if (length, made) != (self.cosine.T_max, self.cosine.last_epoch):
            # Of another number of epochs, or of batches to an update: on along the new curve, from where it is by now.
            self.cosine.T_max, self.cosine.last_epoch = length, made
            for group, base in zip(self.optimizer.param_groups, self.cosine.base_lrs, strict=True):
                group["lr"] = base * (1 + math.cos(math.pi * min(made / length, 1.0))) / 2
        return position

    def _updates(self, steps: int) -> int:
        """So many steps' updates, each of which the schedule sees."""
        return steps // self.recipe.accumulate


def classification_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a classifier's scores, the first of several outputs."""
    return cross_entropy(class_scores(output), labels)


def _talk(model: nn.Module) -> Any:
    """The processes that train a model together, by a group that talks through their hosts; None for one alone.

    The model's own group would mix what is said here with the all-reduces of a captured step.
    """
    import torch.distributed as dist

    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    ranks = dist.get_process_group_ranks(model.process_group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def _gathered(own: RandomState, talk: Any) -> list[RandomState]:
    """Every process's random state, in the order of ranks."""
    import torch.distributed as dist

    if talk is None:
        return [own]
    found: list[RandomState] = [{} for _ in range(dist.get_world_size(talk))]
    for name, state in own.items():
        parts = [torch.empty_like(state) for _ in found]
        dist.all_gather(parts, state, group=talk)
        for each, part in zip(found, parts, strict=True):
            each[name] = part
    return found


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
