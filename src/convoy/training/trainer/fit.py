"""fit: train a classifier on labelled images with `training_step`, epoch by epoch, with checkpoints. What `convoy train` runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy.errors import ConvoyError, InputError
from convoy.pipeline.observer import Observer, ignore_progress
from convoy.prune.accuracy import accuracy, class_scores
from convoy.settings import Settings, checked_settings
from convoy.training.step import TrainingStep
from convoy.training.step_program import StepOptions
from convoy.training.trainer.checkpoint import (
    TrainingPosition,
    random_state,
    read_checkpoint,
    remove_unfinished,
    write_checkpoint,
)
from convoy.training.trainer.epoch import EpochResult, TrainingStart
from convoy.training.trainer.learning_rate import cosine_rate, follow_recipe
from convoy.training.trainer.processes import gathered_random_states, host_group, process_count, process_rank
from convoy.training.trainer.recipe import TrainingRecipe
from convoy.training.trainer.tuning_time import with_tuning_time
from convoy.training.tune_step import observed_training_step
from convoy.typed_torch import backward, process_group, unwrapped
from convoy.zoo import Dataset


def fit(
    model: nn.Module,
    images: Dataset,
    recipe: TrainingRecipe,
    *,
    settings: Settings | None = None,
    test: Dataset | None = None,
    observer: Observer | None = None,
    on_plan: Callable[[TrainingStep], None] | None = None,
    on_start: Callable[[TrainingStart], None] | None = None,
    about: Mapping[str, str] | None = None,
) -> Iterator[EpochResult]:
    """Train a classifier; gives an `EpochResult` after each pass.

    Under `torchrun`, give a model inside DistributedDataParallel, each process its own shard (`Dataset.shard`), and all of
    them one recipe: with a checkpoint, every process has a part in writing it.

    Args:
        model: on its device; trained in place.
        images: what to train on; a last batch that is not full is left out, and so are batches that fill no update.
        recipe: how.
        settings: for tuning; `Settings()` by default. At effort quick without `time_s`, tuning takes at most a tenth of the
            training's estimated time, or 10 s.
        test: images to take the accuracy on after each epoch.
        observer: told of tuning and of each step.
        on_plan: given the step when it has been tuned.
        on_start: told where the training begins, before its first step.
        about: words that are written into the checkpoint (`convoy.zoo.WeightsInfo.to_words`).

    Raises:
        InputError: fewer images than a batch, fewer batches than an update, a checkpoint of another model, or one that is
            there already without `recipe.resume`.
        ConvoyError: the loss became NaN or infinite.
    """
    watch = observer or ignore_progress
    training = _Fit(model, images, recipe, checked_settings(settings), test, watch, on_plan, about)
    if on_start is not None:
        on_start(training.start())
    return training.run()


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
        about: Mapping[str, str] | None = None,
    ) -> None:
        if recipe.checkpoint is not None and recipe.checkpoint.exists() and not recipe.resume:
            todo = "Resume from it, or name another file."
            raise InputError("checkpoint", str(recipe.checkpoint), "a file that is not there yet", todo)
        batches = images.batch_count(recipe.batch, drop_last=True)
        if not batches:
            raise InputError("batch", recipe.batch, f"at most the {len(images)} images that there are")
        if batches < recipe.accumulate:
            raise InputError("accumulate", recipe.accumulate, f"at most the {batches} batches of an epoch")
        # Whole updates alone: no gradient waits for the next epoch, so that its checkpoint needs none.
        self.steps = batches - batches % recipe.accumulate
        self.model, self.images, self.recipe, self.settings = model, images, recipe, settings
        self.test, self.watch, self.on_plan = test, observer, on_plan
        self.own = unwrapped(model)
        self.device = next(model.parameters()).device
        learning = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(
            learning, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
        self.updates = recipe.epochs * self._updates(self.steps)
        self.cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.updates)
        self.about = {**(about or {}), "batch": str(recipe.batch), "processes": str(process_count())}
        self.position, self.is_resumed = TrainingPosition(0, 0), False
        if recipe.resume and recipe.checkpoint is not None and recipe.checkpoint.exists():
            self.position, self.is_resumed = self._resume(recipe.checkpoint), True
        self.group: Any = None
        if recipe.checkpoint is not None:
            self.group = host_group(model)
            if process_rank() == 0:
                remove_unfinished(recipe.checkpoint)
        self.step: Callable[..., torch.Tensor] | None = None

    def start(self) -> TrainingStart:
        """Where it begins."""
        position, epochs = self.position, self.recipe.epochs
        return TrainingStart(position.epoch, position.step, self.steps, epochs, self._rate(), self.is_resumed)

    def run(self) -> Iterator[EpochResult]:
        """Epoch by epoch, from where the checkpoint was."""
        if self.position == TrainingPosition(0, 0):
            cast("Any", torch).manual_seed(self.recipe.seed)
        self.model.train()
        while self.position.epoch < self.recipe.epochs:
            yield self._epoch()

    def _epoch(self) -> EpochResult:
        recipe, start = self.recipe, self.position
        losses: list[torch.Tensor] = []
        seed = recipe.seed * 100_003 + start.epoch
        batches = self.images.batches(recipe.batch, seed=seed, augment=recipe.augment, drop_last=True, start=start.step)
        begun, rate = time.perf_counter(), self._rate()
        for index, (x, y) in enumerate(itertools.islice(batches, self.steps - start.step), start.step):
            batch = (self._placed(x), y.to(self.device, non_blocking=True))
            if self.step is None:
                self.step = self._make_step(batch)
            losses.append(self.step(*batch))
            rate = self._rate()
            if (index + 1) % recipe.accumulate == 0:
                self.cosine.step()
            if len(losses) == 1:  # the first builds, captures, and initialises the optimizer
                self._wait()
                begun = time.perf_counter()
            self.position = TrainingPosition(start.epoch, index + 1)
            if self._due(index + 1):
                self._save()
            self.watch(self._progress(rate, len(losses) - 1, begun), index + 1, self.steps)
        self._wait()
        seconds = time.perf_counter() - begun
        loss = float(torch.stack(losses).mean()) if losses else float("nan")
        if losses and not loss < float("inf"):
            raise ConvoyError(f"the loss is {loss} in epoch {start.epoch + 1}: a lower lr than {recipe.lr:g} may help")
        self.position = TrainingPosition(start.epoch + 1, 0)
        self._save()
        right = None if self.test is None else accuracy(self.own, self.test, batch=recipe.batch)
        speed = (len(losses) - 1) * recipe.batch * process_count() / seconds if len(losses) > 1 else 0.0
        return EpochResult(start.epoch + 1, loss, right, speed, len(losses), rate)

    def _rate(self) -> float:
        """Learning rate of the next update; by its formula, for the optimizer's own may lie on a GPU that is busy."""
        done = self.position.epoch * self._updates(self.steps) + self._updates(self.position.step)
        return cosine_rate(self.recipe.lr, done, self.updates)

    def _progress(self, rate: float, timed: int, begun: float) -> str:
        """A line for the progress bar: epoch, learning rate, and images a second since its first step."""
        speed = timed * self.recipe.batch * process_count() / (time.perf_counter() - begun) if timed else 0.0
        words = f"epoch {self.position.epoch + 1}/{self.recipe.epochs}, lr {rate:.3g}"
        return f"{words}, {speed:.0f} images/s" if speed else words

    def _make_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[..., torch.Tensor]:
        recipe = self.recipe
        if recipe.stock:
            return self._stock_step
        left = recipe.epochs * self.steps - self.position.epoch * self.steps - self.position.step
        step = observed_training_step(
            self.model,
            classification_loss,
            self.optimizer,
            batch,
            options=StepOptions(recipe.amp, None, recipe.clip_grad_norm, recipe.accumulate),
            plan=recipe.plan,
            settings=with_tuning_time(self.settings, self.model, batch[0], left, recipe.amp),
            name=self.images.name,
            observer=self.watch,
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
        backward(loss / recipe.accumulate)
        if (self.position.step + 1) % recipe.accumulate == 0:
            if recipe.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.own.parameters(), recipe.clip_grad_norm)
            cast("Any", self.optimizer).step()
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
        random = gathered_random_states(random_state(self.device), self.group)
        if process_rank() == 0:
            write_checkpoint(
                self.recipe.checkpoint, self.own, self.optimizer, self.cosine, self.position, random, self.about
            )

    def _resume(self, path: Path) -> TrainingPosition:
        """Go where a checkpoint was written.

        An update that had begun there begins anew: files were once written amid updates, and `accumulate` may have changed.
        """
        spread = isinstance(self.model, nn.parallel.DistributedDataParallel)
        rank = torch.distributed.get_rank(process_group(self.model)) if spread else 0
        found = read_checkpoint(
            path, self.own, self.optimizer, self.cosine, self.device, rank, self.steps, about=self.about
        )
        step = found.step - found.step % self.recipe.accumulate
        position = TrainingPosition(found.epoch + 1, 0) if step == self.steps else TrainingPosition(found.epoch, step)
        made = position.epoch * self._updates(self.steps) + self._updates(position.step)
        follow_recipe(self.optimizer, self.cosine, self.recipe, made, self.updates)
        return position

    def _updates(self, steps: int) -> int:
        """So many steps' updates, each of which the schedule sees."""
        return steps // self.recipe.accumulate


def classification_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a classifier's scores, the first of several outputs."""
    return cross_entropy(class_scores(output), labels)
