"""Images without labels, as a data set whose labels are all -1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from convoy.errors import InputError
from convoy.typed_torch import from_numpy
from convoy.zoo.datasets import Dataset
from convoy.zoo.example import Preprocessing
from convoy.zoo.images import (
    ARRAY_FILES,
    IMAGE_ARRAYS,
    center_crop,
    extensions,
    image_files,
    images_of_arrays,
    read_arrays,
)
from convoy.zoo.pixels import Files, Images, Pixels
from convoy.zoo.sources import class_folders, split_folders

NO_LABEL = -1


def unlabelled(paths: Sequence[Path], preprocessing: Preprocessing) -> Dataset:
    """Open images: files, folders (all images in and below them), or one .npz or .safetensors file of images.

    Raises:
        InputError: naming `input`: nothing is there, or an array file stands beside other paths.
    """
    images: Images
    files: tuple[Path, ...] = ()
    if any(path.suffix in ARRAY_FILES for path in paths):
        if len(paths) > 1:
            raise InputError("input", [str(path) for path in paths], "one file of arrays, or image files and folders")
        arrays = read_arrays(paths[0], IMAGE_ARRAYS)
        found = [center_crop(image, preprocessing.size) for image in images_of_arrays(arrays, paths[0])]
        if not found:
            raise InputError("input", str(paths[0]), "at least one image")
        images = Pixels(from_numpy(np.stack(found)).permute(0, 3, 1, 2).contiguous())
    else:
        files = tuple(file for path in paths for file in _files(path))
        images = Files(files, preprocessing.size)
    labels = torch.full((len(images),), NO_LABEL, dtype=torch.int64)
    return Dataset(", ".join(map(str, paths)), images, labels, 0, preprocessing, (), files)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = image_files(path)
        if not found:
            raise InputError(
                "input", str(path), "a folder with images in it", f"Endings: {', '.join(sorted(extensions()))}."
            )
        return found
    if not path.exists():
        raise InputError("input", str(path), "a file or folder that is there")
    return [path]


def has_classes(folder: Path) -> bool:
    """Whether the images of a folder lie in folders of classes."""
    return bool(split_folders(folder)) or bool(class_folders(folder))
