"""Decode every image file of a data set once, before any work is done with it: which cannot be read, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from convoy.errors import InputError
from convoy.typed_torch import from_numpy
from convoy.zoo import pixels as memory
from convoy.zoo.datasets import Dataset
from convoy.zoo.image_size import ImageSize, sides
from convoy.zoo.images import center_crop, decode
from convoy.zoo.pixels import Pixels

WORKERS: Final = 8
"""Threads that decode: Pillow decodes without Python's lock."""

CHUNK: Final = 64
"""Files that are decoded at a time."""


@dataclass(frozen=True, slots=True)
class UnreadableImage:
    """An image file that cannot be read, and what the reader says."""

    file: Path
    reason: str


def check_images(
    dataset: Dataset, on_progress: Callable[[str, int, int], None] | None = None
) -> tuple[Dataset, tuple[UnreadableImage, ...]]:
    """Decode all image files; images that do not come from files of their own are left as they are.

    Args:
        dataset: from `load_dataset`.
        on_progress: called with a message, the number of files that are decoded, and that of all.

    Returns:
        The data set without the files that cannot be read, its pixels in memory where they are small together; and those files.
    """
    if not dataset.files:
        return dataset, ()
    size, total = dataset.preprocessing.size, len(dataset)
    small = total * 3 * math.prod(sides(size)) <= memory.IN_MEMORY_BYTES
    pixels = torch.empty(total if small else 0, 3, *sides(size), dtype=torch.uint8)
    readable: list[int] = []
    unreadable: list[UnreadableImage] = []
    for index, found in enumerate(_decoded(dataset.files, size)):
        if on_progress is not None and index % CHUNK == 0:
            on_progress(f"reading images of {dataset.name}", index, total)
        if isinstance(found, UnreadableImage):
            unreadable.append(found)
            continue
        if small:
            pixels[len(readable)] = from_numpy(found.copy()).permute(2, 0, 1)
        readable.append(index)
    checked = dataset.subset(readable) if unreadable else dataset
    return replace(checked, images=Pixels(pixels[: len(readable)])) if small else checked, tuple(unreadable)


def reading_reason(error: InputError) -> str:
    """What the reader of an image file says, as a phrase."""
    return error.todo.removeprefix("It says: ").rstrip(".") or f"expected {error.expected}"


def _decoded(files: Sequence[Path], size: ImageSize) -> Iterator[np.ndarray | UnreadableImage]:
    def one(file: Path) -> np.ndarray | UnreadableImage:
        try:
            return center_crop(decode(file, str(file)), size)
        except InputError as error:
            return UnreadableImage(file, reading_reason(error))

    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        for start in range(0, len(files), CHUNK):
            yield from pool.map(one, files[start : start + CHUNK])
