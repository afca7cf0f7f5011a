"""The training that `convoy train` runs, in one of its processes: data, last layer, epochs, weights."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from convoy.cli.command_parts.head import fitted
from convoy.cli.command_parts.labelled_data import (
    LARGEST_BATCH,
    checked,
    fitting_batch,
    reading,
    tell_unreadable,
    told_of,
)
from convoy.cli.options import values
from convoy.cli.output.progress import Bar
from convoy.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from convoy.settings import Settings
    from convoy.training.step import TrainingStep
    from convoy.training.trainer.epoch import EpochResult, TrainingStart
    from convoy.training.trainer.recipe import TrainingRecipe
    from convoy.zoo import Dataset, WeightsInfo
    from convoy.zoo.image_size import ImageSize

USUAL_LR: Final = 0.1
"""Learning rate of residual nets that are trained from the start with 128 images in an update."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The model and the data, as the command names them."""

    model: str
    weights: str | None
    data: str
    size: ImageSize | None
    images: int | None
    trust: bool
    head: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """The files that are written at the start and at the end."""

    plan: Path | None
    weights: Path | None


@dataclasses.dataclass(frozen=True, slots=True)
class GivenOptions:
    """Whether the user chose batch and learning rate; what was not chosen is fitted to the number of images."""

    batch: bool
    lr: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One of so many processes, and its device."""

    device: str
    rank: int = 0
    count: int = 1


def run(
    source: Source, recipe: TrainingRecipe, chosen: GivenOptions, settings: Settings, outputs: Outputs, place: Place
) -> None:
    """Train in one of so many processes, on its own device; the first tells of it.

    Args:
        source: model and data.
        recipe: how.
        chosen: what of the recipe is the user's own choice.
        settings: of the captured step.
        outputs: files to write.
        place: process and device.
    """
    from convoy.training.trainer.fit import fit

    first = place.rank == 0
    module = values.load_fp32(source.model, source.weights, place.device, trust=source.trust)
    with Bar() as bar:
        opened = open_all(source, module, place, bar)
        shard = opened.training.shard(place.rank, place.count)
        recipe = fitted_recipe(recipe, chosen, len(shard))
        tell = bar.say if first else ignore
        trained = distributed(module, place.device) if place.count > 1 else module

        def keep(step: TrainingStep) -> None:
            if outputs.plan is not None and first:
                step.save(outputs.plan)

        def begin(start: TrainingStart) -> None:
            for text in (told_of(opened.training, opened.test), opened.head, start_line(start, recipe)):
                if text:
                    tell(text)
            if first and outputs.weights is None and recipe.checkpoint is None:
                bar.tell("the trained weights are not kept: give --out FILE.safetensors, or --checkpoint FILE")

        epochs = fit(
            trained, shard, recipe, settings=settings, test=opened.test, observer=bar, on_plan=keep,
            on_start=begin, about=opened.info.to_words(),
        )  # fmt: skip
        accuracy: float | None = None
        for epoch in epochs:
            tell(line(epoch, recipe))
            accuracy = epoch.accuracy
        if outputs.weights is not None and first:
            save(module, outputs.weights, opened, accuracy)
            tell(f"weights: {outputs.weights}")


def ignore(text: str) -> None:
    """Print nothing: another process does."""
    del text


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """The images, the words that go with the weights, and a line about the last layer where it needs one."""

    training: Dataset
    test: Dataset | None
    info: WeightsInfo
    head: str


def open_all(source: Source, module: nn.Module, place: Place, bar: Bar) -> Opened:
    """Read the data, every file checked, and fit the last layer to its classes."""
    import torch

    from convoy.zoo import WeightsInfo, data_tokens, example_batch, read_info
    from convoy.zoo.image_size import sides

    info = read_info(source.weights)
    read_for = reading(module, source.model, info, source.size, place.device)
    x = torch.zeros(example_batch(module) or 1, 3, *sides(read_for.preprocessing.size), device=place.device)
    check_any_batch(module, source.model, x)
    read_for, said = fitted(module, source.model, source.data, read_for, source.head, x)
    training = checked_by_all(read_for.listed(source.data, "train", source.images), place, bar)
    test = read_for.open_test(source.data, source.images, bar) if place.rank == 0 else None
    trained_on = info.trained_on | data_tokens(source.data)
    words = {"model": Path(source.model).name}  # of a FILE.py:FACTORY, without the folder that it lies in
    return Opened(
        training, test, WeightsInfo(read_for.class_names, read_for.preprocessing.size, trained_on, words), said
    )


def check_any_batch(module: nn.Module, name: str, x: torch.Tensor) -> None:
    """Refuse an exported program that takes one batch alone: the last batch of the test images is smaller than the others.

    Raises:
        InputError: naming `model`.
    """
    import torch

    from convoy.zoo.model_names import is_exported

    if not is_exported(name):
        return
    try:
        with torch.no_grad():
            module(torch.cat([x, x[:1]]))
    except Exception as error:  # a program may fail in any way on a shape that it was not exported for
        todo = f"It was exported for batches of {len(x)} alone; export it with a dynamic batch (dynamic_shapes)."
        raise InputError("model", name, "a model that takes any batch", todo) from error


def checked_by_all(images: Dataset, place: Place, bar: Bar) -> Dataset:
    """Check all image files: one process alone, or each of several its share, so that all leave out the same ones."""
    if place.count == 1:
        return checked(images, bar)
    import torch
    import torch.distributed as dist

    from convoy.zoo import check_images

    share = range(place.rank, len(images), place.count)
    _, unreadable = check_images(images.subset(share), bar)
    tell_unreadable(unreadable, bar)
    left_out = torch.zeros(len(images), dtype=torch.int32, device=place.device)
    files = {image.file for image in unreadable}
    for index in share:
        left_out[index] = int(bool(images.files) and images.files[index] in files)
    dist.all_reduce(left_out)  # pyright: ignore[reportUnknownMemberType] - torch.distributed is untyped
    readable = [int(index) for index in (left_out == 0).nonzero().flatten().cpu().numpy()]
    return images if len(readable) == len(images) else images.subset(readable)


def fitted_recipe(recipe: TrainingRecipe, chosen: GivenOptions, images: int) -> TrainingRecipe:
    """The recipe, with batch and learning rate fitted to so many images of one process where the user chose none."""
    batch = recipe.batch if chosen.batch else fitting_batch(images)
    lr = recipe.lr if chosen.lr else USUAL_LR * batch * recipe.accumulate / LARGEST_BATCH
    return dataclasses.replace(recipe, batch=batch, lr=lr)


def save(module: nn.Module, path: Path, opened: Opened, accuracy: float | None) -> None:
    """Write the weights, with what their outputs stand for."""
    from convoy.prune import save_weights

    words = opened.info.to_words()
    if accuracy is not None and opened.test is not None:
        words |= {"test_accuracy": f"{accuracy:.4f} on {len(opened.test)} images"}
    save_weights(module, path, words)


def start_line(start: TrainingStart, recipe: TrainingRecipe) -> str:
    """Where a training begins, in a line."""
    if start.is_resumed and start.epochs_done >= start.epochs:
        return (
            f"{start.epochs_done} of {start.epochs} epochs are done; nothing is left to train (--epochs sets how many)"
        )
    words = f"{recipe.batch} images a step, {start.steps} steps an epoch, learning rate {start.lr:.4g}"
    if not start.is_resumed:
        return words
    return f"resumes at epoch {start.epochs_done + 1} of {start.epochs}, step {start.step} of {start.steps}: {words}"


def line(epoch: EpochResult, recipe: TrainingRecipe) -> str:
    """The results of one epoch, in a line."""
    right = "" if epoch.accuracy is None else f"  accuracy {epoch.accuracy:.2%}"
    speed = f"  {epoch.images_per_s:,.0f} images/s" if epoch.images_per_s else ""
    return f"epoch {epoch.number} of {recipe.epochs}: loss {epoch.loss:.4f}{right}  lr {epoch.lr:.3g}{speed}"


def distributed(module: nn.Module, device: str) -> nn.Module:
    """The module inside DistributedDataParallel, on this process's own device."""
    import torch

    own = [torch.cuda.current_device()] if device == "cuda" else None
    return torch.nn.parallel.DistributedDataParallel(module, device_ids=own)


@contextmanager
def processes(device: str) -> Generator[Place]:
    """Device and rank among the processes that torchrun started; one alone without it."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Place(device)
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
        yield Place(device, dist.get_rank(), dist.get_world_size())
        # All processes leave together. One that leaves first may reset the connection of one that waits: nothing is lost.
        with suppress(RuntimeError):
            dist.barrier()  # pyright: ignore[reportUnknownMemberType] - torch.distributed is untyped
    finally:
        gc.collect()  # a DistributedDataParallel that is left to the interpreter's end may abort there
        dist.destroy_process_group()
