"""convoy train: train a classifier on labelled images by tuned steps; with checkpoints, and over several GPUs by torchrun."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.cli import interrupt, options
from convoy.cli.command_options import train_options as given
from convoy.cli.output import say
from convoy.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from convoy.settings import Settings
    from convoy.training.step import TrainingStep
    from convoy.training.trainer.fit import EpochResult
    from convoy.training.trainer.recipe import TrainingRecipe
    from convoy.zoo.image_size import ImageSize


def train(
    model: options.Model,
    data: given.Data = "synthetic",
    images: given.Images = None,
    batch: given.Batch = 128,
    size: options.Size = None,
    device: options.Device = None,
    weights: options.Weights = None,
    trust: options.Trust = False,
    epochs: given.Epochs = 1,
    lr: given.Lr = 0.1,
    momentum: given.Momentum = 0.9,
    weight_decay: given.WeightDecay = 1e-4,
    amp: given.Amp = None,
    clip_grad_norm: given.ClipGradNorm = None,
    accumulate: given.Accumulate = 1,
    seed: given.Seed = 0,
    stock: given.Stock = False,
    numerics: options.Numerics = "as_torch",
    effort: options.Effort = "quick",
    db: options.Db = None,
    checkpoint: given.Checkpoint = None,
    every: given.CheckpointEvery = 0,
    resume: given.Resume = False,
    plan: given.Plan = None,
    save_plan: given.SavePlan = None,
) -> None:
    """Train MODEL on labelled images: loss, accuracy and images a second of each epoch. Under torchrun: on all its GPUs."""
    from convoy.training.trainer.recipe import TrainingRecipe, with_amp

    recipe = TrainingRecipe(
        epochs=epochs,
        batch=batch,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        seed=seed,
        clip_grad_norm=clip_grad_norm,
        accumulate=accumulate,
        stock=stock,
        plan=plan,
        checkpoint=checkpoint,
        every=every,
        resume=resume,
    )
    recipe, wanted = with_amp(recipe, amp), options.image_size(size)
    settings = options.settings_from(effort=effort, numerics=numerics, db=db)
    options.check_outputs({"--checkpoint": checkpoint, "--save-plan": save_plan})

    with _interruptible(checkpoint, resume=resume), processes(options.pick_device(device)) as place:
        source = Source(model, weights, data, wanted, images, trust)
        run(source, recipe, settings, save_plan, *place)  # its tensors are freed before the process group is destroyed


@contextmanager
def _interruptible(checkpoint: Path | None, *, resume: bool) -> Generator[None]:
    """Ctrl-C removes the unfinished checkpoint and reports the position of the last one."""
    if checkpoint is None:
        interrupt.keeps(lambda: f"nothing of this training is kept (see --checkpoint); {interrupt.MEASURED}")
        yield
        return
    another = None if resume else _identity(checkpoint)

    def kept() -> str:
        from convoy.training.trainer.checkpoint import read_position

        there = _identity(checkpoint)
        if there is None or there == another:
            return f"this training has not written {checkpoint} yet"
        position = read_position(checkpoint)
        made = f"{position.epoch} epochs and {position.step} steps" if position else "the last checkpoint"
        return f"{checkpoint} holds {made}; go on with --resume"

    def remove() -> None:
        from convoy.training.trainer.checkpoint import remove_unfinished

        remove_unfinished(checkpoint)

    interrupt.keeps(kept)
    with interrupt.cleaned_up(remove):
        yield


def _identity(file: Path) -> tuple[int, int] | None:
    """Another one for each file that takes this one's place; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The model and the data, as the command names them."""

    model: str
    weights: str | None
    data: str
    size: ImageSize | None
    images: int | None
    trust: bool


def run(
    source: Source,
    recipe: TrainingRecipe,
    settings: Settings,
    save_plan: Path | None,
    where: str,
    rank: int,
    count: int,
) -> None:
    """Train in one of so many processes, on its own device; the first tells of it.

    Args:
        source: model and data.
        recipe: how.
        settings: of the captured step.
        save_plan: where to write its plan.
        where: device word.
        rank: which process this is.
        count: how many there are.
    """
    from convoy.cli.progress import Bar
    from convoy.training.trainer.fit import fit
    from convoy.zoo import load_dataset

    module = options.load(source.model, source.weights, "fp32", where, trust=source.trust)
    read_for = needs_of(module, source.model, source.size, where)
    dataset = load_dataset(source.data, "train", limit=source.images, **read_for)
    test = load_dataset(source.data, "test", limit=source.images, **read_for) if rank == 0 else None
    trained = distributed(module, where) if count > 1 else module

    def keep(step: TrainingStep) -> None:
        if save_plan is not None and rank == 0:
            step.save(save_plan)

    with Bar() as bar:
        shard = dataset.shard(rank, count)
        for epoch in fit(trained, shard, recipe, settings=settings, test=test, observer=bar, on_plan=keep):
            if rank == 0:
                say(line(epoch))


def line(epoch: EpochResult) -> str:
    """The results of one epoch, in a line."""
    right = "" if epoch.accuracy is None else f"  accuracy {epoch.accuracy:.2%}"
    rate = f"  {epoch.images_per_s:.0f} images/s" if epoch.images_per_s else ""
    return f"epoch {epoch.number}: loss {epoch.loss:.4f}{right}{rate}"


def needs_of(module: nn.Module, name: str, size: ImageSize | None, device: str) -> dict[str, Any]:
    """Arguments for reading a data set: the model's preprocessing, with the requested size, and its number of classes."""
    from convoy.zoo import preprocessing

    wanted = preprocessing(name)
    shape = dataclasses.replace(wanted, size=size or wanted.size)
    return {"preprocessing": shape, "classes": outputs_of(module, shape.size, device)}


def outputs_of(module: nn.Module, size: ImageSize, device: str) -> int:
    """How many classes a classifier tells apart."""
    import torch

    from convoy.prune.accuracy import class_scores
    from convoy.zoo.image_size import sides

    module.eval()
    with torch.no_grad():
        return class_scores(module(torch.zeros(1, 3, *sides(size), device=device))).shape[1]


def distributed(module: nn.Module, device: str) -> nn.Module:
    """The module inside DistributedDataParallel, on this process's own device."""
    import torch

    own = [torch.cuda.current_device()] if device == "cuda" else None
    return torch.nn.parallel.DistributedDataParallel(module, device_ids=own)


@contextmanager
def processes(device: str) -> Generator[tuple[str, int, int]]:
    """Device word, rank and number of the processes that torchrun started; one alone without it."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield device, 0, 1
        return
    import torch
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise InputError("LOCAL_RANK", local, f"one of the {torch.cuda.device_count()} GPUs that there are")
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield device, dist.get_rank(), dist.get_world_size()
        # All processes leave together. One that leaves first may reset the connection of one that waits: nothing is lost.
        with suppress(RuntimeError):
            dist.barrier()  # pyright: ignore[reportUnknownMemberType] - torch.distributed is untyped
    finally:
        gc.collect()  # a DistributedDataParallel that is left to the interpreter's end may abort there
        dist.destroy_process_group()
