"""Data sets as commands open them: every image file is checked first, and those that cannot be read are listed and left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.cli.options import inputs
from convoy.cli.output.progress import Bar
from convoy.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from convoy.zoo import Dataset, Preprocessing, UnreadableImage, WeightsInfo
    from convoy.zoo.image_size import ImageSize

LEAST_STEPS = 8
"""Steps of an epoch for which the batch that a command chooses is made smaller."""

LARGEST_BATCH, SMALLEST_BATCH = 128, 4


@dataclass(frozen=True, slots=True)
class Labelled:
    """How a model's labelled images are read.

    Attributes:
        preprocessing: the model's, with the size that is used.
        outputs: of the model.
        class_names: what its outputs stand for, as its weights say; empty where they do not.
    """

    preprocessing: Preprocessing
    outputs: int
    class_names: tuple[str, ...]

    def listed(self, source: str, split: str, limit: int | None) -> Dataset:
        """Open a source; its files are not checked.

        Args:
            source: as `--data` takes it.
            split: `train`, `test` or `all`.
            limit: most images, or None.

        Raises:
            InputError: no such data, or classes that the model does not have.
        """
        from convoy.zoo import load_dataset

        return load_dataset(
            source,
            split,
            preprocessing=self.preprocessing,
            classes=self.outputs,
            class_names=self.class_names,
            limit=limit,
        )

    def open(self, source: str, split: str, limit: int | None, bar: Bar) -> Dataset:
        """`listed`, with every file checked: those that cannot be read are listed on standard error and left out.

        Raises:
            InputError: as `listed`, or no image can be read.
        """
        return checked(self.listed(source, split, limit), bar)

    def open_test(self, source: str, limit: int | None, bar: Bar) -> Dataset | None:
        """The images that are held out for testing; None, told in a line, where the classes have too few for that."""
        from convoy.zoo import has_test_images

        if not has_test_images(source):
            bar.tell(
                f"no class of {source} has the 10 images of which one is held out for testing: no accuracy is taken"
            )
            return None
        return self.open(source, "test", limit, bar)


def checked(images: Dataset, bar: Bar) -> Dataset:
    """A data set without the files that cannot be read, which are listed on standard error.

    Raises:
        InputError: no image can be read.
    """
    from convoy.zoo import check_images

    found, unreadable = check_images(images, bar)
    tell_unreadable(unreadable, bar)
    if len(found) == 0:
        raise InputError("data", images.name, "an image that can be read", f"None of its {len(images)} can.")
    return found


def reading(module: nn.Module, model: str, info: WeightsInfo, size: ImageSize | None, device: str) -> Labelled:
    """How to read images for a model: the size asked for, else that of its weights or its own example, else its library's.

    Args:
        module: the model; it runs once to count its classes.
        model: its name.
        info: what its weights say.
        size: as asked for.
        device: where it is.
    """
    from convoy.zoo import example_size, preprocessing

    wanted = preprocessing(model)
    chosen = dataclasses.replace(wanted, size=size or info.size or example_size(module) or wanted.size)
    return Labelled(chosen, outputs_of(module, chosen.size, device), info.classes)


def outputs_of(module: nn.Module, size: ImageSize, device: str) -> int:
    """How many classes a classifier tells apart."""
    import torch

    from convoy.prune.accuracy import class_scores
    from convoy.zoo import example_batch, own_dtype, parse_dtype
    from convoy.zoo.image_size import sides

    module.eval()
    dtype = parse_dtype(own_dtype(module))
    x = torch.zeros(example_batch(module) or 1, 3, *sides(size), device=device, dtype=dtype)
    with torch.no_grad(), inputs.fitting(module, (x,)):
        return class_scores(module(x)).shape[1]


def tell_unreadable(found: Sequence[UnreadableImage], bar: Bar) -> None:
    """List the image files that are left out."""
    for image in found:
        bar.tell(f"left out, for it cannot be read: {image.file} ({image.reason})")


def told_of(training: Dataset, test: Dataset | None) -> str:
    """How many images and classes there are, in a line."""
    from convoy.zoo.datasets import listed

    names = f" ({listed(training.class_names)})" if training.class_names else ""
    tested = f"{len(test):,}" if test is not None else "no"
    return f"{len(training):,} training and {tested} test images, {training.classes:,} classes{names}"


def fitting_batch(images: int) -> int:
    """The batch that a command chooses: 128, or less, a power of two, so that an epoch has at least eight steps."""
    batch = LARGEST_BATCH
    while batch > SMALLEST_BATCH and images // batch < LEAST_STEPS:
        batch //= 2
    return min(batch, max(images, 1))
