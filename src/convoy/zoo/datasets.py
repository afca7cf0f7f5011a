"""Labelled images for training and for accuracy, in one form whatever they come from (docs/how-to/datasets.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from convoy.errors import InputError, unknown_name
from convoy.typed_torch import to_list
from convoy.zoo.example import Preprocessing
from convoy.zoo.image_size import ImageSize
from convoy.zoo.images import ARRAY_FILES, image_files
from convoy.zoo.pixels import Arrays, Images, ImageSubset, Resized, augmented, kept, normalised, seeded
from convoy.zoo.sources import (
    HELD_OUT,
    SPLITS,
    Found,
    cifar10,
    class_folders,
    of_path,
    places,
    split_folders,
    synthetic,
)

SYNTHETIC: Final = "synthetic"
CIFAR10: Final = "cifar10"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Labelled images of one size.

    Attributes:
        name: the source, as the user wrote it.
        images: where the pixels come from.
        labels: class indices, int64 [n].
        classes: how many classes there are: labels lie in [0, classes).
        preprocessing: size of the images, and the statistics that `batches` normalises by.
        class_names: name of each class; empty where neither the source nor the caller gave any.
        files: one image file for each image, in the same order; empty where the images come from elsewhere.
    """

    name: str
    images: Images
    labels: torch.Tensor
    classes: int
    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def batch_count(self, batch: int, *, drop_last: bool = False) -> int:
        """How many batches one pass over all images gives."""
        return len(self) // batch if drop_last else math.ceil(len(self) / batch)

    def batches(
        self, batch: int, *, seed: int | None = None, augment: bool = False, drop_last: bool = False, start: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One pass over all images: x, fp32 [b, 3, height, width], contiguous, normalised by channel; y, int64 [b].

        Args:
            batch: images at a time; the last batch may be smaller.
            seed: of order and augmentation; give each epoch its own. None: in the source's order.
            augment: turn half of the images left to right, and move each by up to an eighth of its size, black coming in.
                Needs a seed.
            drop_last: leave a smaller last batch out.
            start: begin with this batch, which comes out as it would have after those before it: how training resumes.

        Raises:
            InputError: naming `batch`, `augment` or `start`, or an image file that cannot be read.
        """
        if batch < 1:
            raise InputError("batch", batch, "an integer of at least 1")
        if augment and seed is None:
            raise InputError("augment", augment, "False without a seed")
        count = self.batch_count(batch, drop_last=drop_last)
        if not 0 <= start <= count:
            raise InputError("start", start, f"an integer from 0 to {count}")
        return self._batches(batch, range(start, count), seed, augment)

    def _batches(
        self, batch: int, numbers: range, seed: int | None, augment: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        every = len(self)
        order = torch.arange(every) if seed is None else torch.randperm(every, generator=seeded(seed))
        for number in numbers:
            chosen = order[number * batch : (number + 1) * batch]
            pixels = self.images.read(to_list(chosen))
            if augment and seed is not None:
                pixels = augmented(pixels, seeded(seed * 1_000_003 + number))
            yield normalised(pixels, self.preprocessing), self.labels[chosen]

    def shard(self, index: int, count: int) -> Dataset:
        """Every `count`-th image from the `index`-th on: one of `count` equal parts; a remainder is left out."""
        return self.subset(range(index, len(self) - len(self) % count, count))

    def take(self, count: int) -> Dataset:
        """The first images of each class, `count` together (or all there are), in the source's order."""
        return self.subset(sorted(sorted(range(len(self)), key=places(self.labels).__getitem__)[:count]))

    def subset(self, indices: Sequence[int]) -> Dataset:
        """The images at these indices, in this order."""
        chosen = list(indices)
        files = tuple(self.files[index] for index in chosen) if self.files else ()
        labels = self.labels[torch.tensor(chosen, dtype=torch.int64)]
        return replace(self, images=ImageSubset(self.images, chosen), labels=labels, files=files)

    def image_name(self, index: int) -> str:
        """The file of an image, or its number in the source."""
        return str(self.files[index]) if self.files else f"image {index}"


def load_dataset(
    source: str,
    split: str = "train",
    *,
    preprocessing: Preprocessing,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    limit: int | None = None,
) -> Dataset:
    """Open a source of labelled images. Nothing is downloaded, and nothing in a file is unpickled.

    Args:
        source: one of
            `synthetic` or `synthetic:N`: N images made up by the computer, class after class in turn; easily learnt.
            `cifar10:PATH` or `cifar10`: CIFAR-10's binary version (`data_batch_1.bin` ..., in the folder or in its
            `cifar-10-batches-bin`), or a folder of one `cifar10*train*.safetensors` and one `cifar10*test*.safetensors`, or
            one such file. Without a path: `cifar-10-batches-bin` in the working folder or in `data`.
            A folder: `train` and `test` (or `val`, `valid`) with a folder of images for each class, or these class folders
            at once; classes are numbered in the order of their names.
            An .npz or .safetensors file: `labels` (integers, [n]) beside `images` (uint8, [n, 3, h, w]) or beside `jpeg`
            (uint8, all files' bytes) and `offsets` (integers, [n + 1]).
        split: `train`, `test`, or `all` for both. A source without splits of its own (`own_splits`) gives every tenth
            image of each class to `test`, the others to `train`.
        preprocessing: size and statistics that the model wants (`convoy.zoo.preprocessing(name)`).
        classes: outputs of the model; data with a label beyond them are refused. `synthetic` has as many (None: 10).
        class_names: name of the class that each output of the model stands for. Labels are given by these names where the
            source has names too: a folder `square` gets the number of the output that stands for `square`.
        limit: take so many images, the first of each class; None: all.

    Raises:
        InputError: naming `data` and the missing or damaged file, or another argument.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    for name, value in (("limit", limit), ("classes", classes)):
        if value is not None and value < 1:
            raise InputError(name, value, "an integer of at least 1")
    found = _opened(source, split, preprocessing.size, classes or len(class_names) or 10)
    if len(found.images) == 0:
        raise InputError("data", source, "at least one image", f"Its split {split!r} has none.")
    found = _by_name(found, class_names, source)
    if classes is not None and found.classes > classes:
        raise InputError(
            "data", source, f"at most the {classes} classes that the model tells apart", f"It has {found.classes}."
        )
    made = Dataset(source, found.images, found.labels, found.classes, preprocessing, found.names, found.files)
    made = made if limit is None else made.take(limit)
    return replace(made, images=kept(made.images, preprocessing.size)) if _is_decoded(found.images) else made


def _opened(source: str, split: str, size: ImageSize, classes: int) -> Found:
    word, _, rest = source.partition(":")
    if word == SYNTHETIC:
        return synthetic(source, rest, split, size, classes)
    return cifar10(source, rest, split, size) if word == CIFAR10 else of_path(Path(source), split, size)


def _by_name(found: Found, names: Sequence[str], source: str) -> Found:
    """The same images with the model's own class numbers; InputError where the model has no class of some name."""
    if not names or not found.names or tuple(names) == found.names:
        return replace(found, names=found.names or tuple(names)) if len(names) >= found.classes else found
    index = {name: number for number, name in enumerate(names)}
    unknown = [name for name in found.names if name not in index]
    if unknown:
        expected = f"classes among the model's {len(names)}: {listed(names)}"
        raise InputError("data", source, expected, f"It also has {listed(unknown)}.")
    numbers = torch.tensor([index[name] for name in found.names])
    return replace(found, labels=numbers[found.labels], classes=len(names), names=tuple(names))


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names with commas, the first few of many."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def classes_of(source: str, outputs: int) -> tuple[int, tuple[str, ...]]:
    """How many classes a source has, and their names where it says; no image is decoded.

    Args:
        source: as `load_dataset` takes it.
        outputs: of the model: `synthetic` has as many classes.

    Raises:
        InputError: as `load_dataset`.
    """
    found = _opened(source, "train", 1, outputs)
    return found.classes, found.names


def own_splits(source: str) -> bool:
    """Whether a source says itself which images are for testing: all do but a single file and a folder of classes."""
    word, _, rest = source.partition(":")
    if word == CIFAR10:
        return Path(rest).suffix not in ARRAY_FILES
    return word == SYNTHETIC or bool(split_folders(Path(source)))


def has_test_images(source: str) -> bool:
    """Whether a source has images for testing: a folder of classes with fewer than ten images in each holds none out."""
    path = Path(source)
    if not path.is_dir():
        return True
    own = split_folders(path)
    if own:
        return "test" in own
    return any(len(image_files(path / name)) >= HELD_OUT for name in class_folders(path)) or not class_folders(path)


def _is_decoded(images: Images) -> bool:
    """Whether decoded images should be kept: synthetic images are cheap to make again, and folders may change in size."""
    return isinstance(images, (Arrays, Resized))
