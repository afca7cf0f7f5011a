"""Sources of a data set's pixels, with one interface; and the operations on pixels before a model reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from PIL import Image

from convoy.typed_torch import from_numpy
from convoy.zoo.example import Preprocessing
from convoy.zoo.image_size import ImageSize, sides
from convoy.zoo.images import center_crop, decode, images_of_arrays

IN_MEMORY_BYTES: Final = 1 << 30
"""Images whose pixels take no more than this are decoded once and kept."""

NOISES: Final = 61
"""Noise images that synthetic images take turns with; prime, so that each class meets all of them."""

CELLS: Final = 8
"""Rows and columns of a synthetic class's pattern."""


class Images(Protocol):
    """Images of one size that can be read by index."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """uint8 [len(indices), 3, height, width], RGB."""
        ...


@dataclass(frozen=True, slots=True)
class Pixels:
    """Images in memory, uint8 [n, 3, height, width]."""

    pixels: torch.Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Copies of them."""
        return self.pixels[torch.as_tensor(indices, dtype=torch.int64)]


@dataclass(frozen=True, slots=True)
class Arrays:
    """Images of a file's arrays (`images_of_arrays`): those at `indices`, decoded when read."""

    arrays: dict[str, np.ndarray]
    path: Path
    indices: Sequence[int]
    size: ImageSize

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Decode, resize, crop."""
        wanted = [self.indices[i] for i in indices]
        return _stacked([center_crop(image, self.size) for image in images_of_arrays(self.arrays, self.path, wanted)])


@dataclass(frozen=True, slots=True)
class Files:
    """Image files, read anew each time: a folder may be larger than memory."""

    paths: tuple[Path, ...]
    size: ImageSize

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Decode, resize, crop; eight at a time, for Pillow decodes without Python's lock."""
        with ThreadPoolExecutor(max_workers=8) as pool:
            return _stacked(list(pool.map(self._one, indices)))

    def _one(self, index: int) -> np.ndarray:
        return center_crop(decode(self.paths[index], str(self.paths[index])), self.size)


@dataclass(frozen=True, slots=True)
class Resized:
    """Images in memory, uint8 [n, 3, h, w], for a model that wants another size."""

    pixels: torch.Tensor
    size: ImageSize

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Resize, crop."""
        return _stacked(
            [center_crop(Image.fromarray(self.pixels[i].permute(1, 2, 0).numpy()), self.size) for i in indices]
        )


@dataclass(frozen=True, slots=True)
class ImageSubset:
    """Some images of others."""

    images: Images
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Read them from the others."""
        return self.images.read([self.indices[i] for i in indices])


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Image i is half its class's coarse pattern and half one of a few noise images; its class is i % len(patterns)."""

    count: int
    patterns: torch.Tensor
    noise: torch.Tensor

    @staticmethod
    def of(count: int, classes: int, size: ImageSize, seed: int) -> Synthetic:
        """The patterns are the same for every seed; the noise is not."""
        patterns = torch.randint(0, 256, (classes, 3, CELLS, CELLS), generator=seeded(0), dtype=torch.uint8)
        noise = torch.randint(0, 256, (NOISES, 3, *sides(size)), generator=seeded(seed), dtype=torch.uint8)
        return Synthetic(count, patterns, noise)

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Make them."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        rows, columns = (torch.arange(side) * CELLS // side for side in self.noise.shape[-2:])
        pattern = self.patterns[index % len(self.patterns)][:, :, rows][:, :, :, columns]
        return (pattern // 2) + (self.noise[index % NOISES] // 2)


def kept(images: Images, size: ImageSize) -> Images:
    """The same images, in memory where they are small together."""
    if len(images) * 3 * math.prod(sides(size)) > IN_MEMORY_BYTES or len(images) == 0:
        return images
    return Pixels(images.read(range(len(images))))


def normalised(pixels: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """(RGB / 255 - mean) / std by channel, fp32; pixels are uint8 [b, 3, h, w]."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    return pixels.to(torch.float32).div_(255.0).sub_(mean).div_(std)


def augmented(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Half of the images turned left to right, each moved by up to an eighth of its size in both directions.

    Black comes in at the borders: for 32x32 images this is what He et al., "Deep residual learning" (CVPR 2016), trained
    CIFAR's nets on.
    """
    count, _, height, width = pixels.shape
    reach = max(1, height // 8)
    turned = torch.rand(count, generator=generator) < 0.5
    moves = torch.randint(0, 2 * reach + 1, (count, 2), generator=generator)
    padded = torch.nn.functional.pad(pixels, (reach,) * 4)
    columns = torch.arange(width)
    columns = torch.where(turned[:, None], columns.flip(0), columns) + moves[:, 1:]
    rows = torch.arange(height) + moves[:, :1]
    image = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def seeded(seed: int) -> torch.Generator:
    """A generator of its own, so that nobody else's random numbers change."""
    return torch.Generator().manual_seed(seed)


def _stacked(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
