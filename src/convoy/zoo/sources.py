"""Where data sets come from: CIFAR-10's files, arrays in files, folders of classes, and images made up.

See docs/how-to/datasets.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from convoy.errors import InputError
from convoy.setting_values import is_count
from convoy.typed_torch import from_numpy, to_list
from convoy.untrusted import read_bytes
from convoy.zoo.image_size import ImageSize, sides
from convoy.zoo.images import ARRAY_FILES, IMAGE_ARRAYS, extensions, image_files, read_arrays
from convoy.zoo.pixels import Arrays, Files, Images, Pixels, Resized, Synthetic

SPLITS: Final = ("train", "test", "all")

CIFAR10_CLASSES: Final = 10
CIFAR10_ROW: Final = 1 + 3 * 32 * 32
"""Bytes of one image in CIFAR-10's binary files: the label, then red, green and blue planes of 32 rows of 32."""
MOST_CIFAR10_BYTES: Final = 1 << 30
CIFAR10_FILES: Final = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
CIFAR10_PLACES: Final = ("cifar-10-batches-bin", "data/cifar-10-batches-bin")
"""Where `cifar10` alone looks, from the working folder: the archive unpacked here, or in torchvision's usual `data`."""

MOST_CLASSES: Final = 1 << 24
"""Largest label of a file."""

HELD_OUT: Final = 10
"""Of a source without splits of its own, every so-many-th image of each class is for testing."""

SYNTHETIC_IMAGES: Final = {"train": 1024, "test": 256, "all": 1280}

CIFAR10_NAMES: Final = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True, slots=True)
class Found:
    """A source of labelled images, opened.

    Attributes:
        images: the images.
        labels: class indices, int64 [n].
        classes: number of classes.
        names: of the classes; empty where the source does not say.
        files: one image file for each image; empty where they come from elsewhere.
    """

    images: Images
    labels: torch.Tensor
    classes: int
    names: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


def synthetic(source: str, count: str, split: str, size: ImageSize, classes: int) -> Found:
    """`synthetic` and `synthetic:count`; noise of its own for each split."""
    if count and not is_count(count):
        raise InputError("data", source, "synthetic:N with N of at least 1")
    total = int(count) if count else SYNTHETIC_IMAGES[split]
    made = Synthetic.of(total, classes, size, seed=1 + SPLITS.index(split))  # test images differ from training images
    return Found(made, torch.arange(total) % classes, classes)


def cifar10(source: str, place: str, split: str, size: ImageSize) -> Found:
    """`cifar10` and `cifar10:place`: the binary version, or files of arrays."""
    path = Path(place) if place else next((p for p in map(Path, CIFAR10_PLACES) if p.is_dir()), None)
    if path is None:
        expected = "CIFAR-10's binary version in ./cifar-10-batches-bin or ./data/cifar-10-batches-bin"
        todo = "Unpack cifar-10-binary.tar.gz there, or say where it is: cifar10:PATH."
        raise InputError("data", source, expected, todo)
    if path.suffix in ARRAY_FILES:
        return _of_cifar10_file(path, split, size)
    if not path.is_dir():
        raise InputError("data", source, "a folder that is there, or a .safetensors or .npz file")
    folder = path / CIFAR10_PLACES[0] if (path / CIFAR10_PLACES[0]).is_dir() else path
    wanted = ("train", "test") if split == "all" else (split,)
    if any((folder / name).is_file() for names in CIFAR10_FILES.values() for name in names):
        rows = np.concatenate([_cifar10_rows(folder / name) for part in wanted for name in CIFAR10_FILES[part]])
        pixels = from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy())
        images = Pixels(pixels) if sides(size) == (32, 32) else Resized(pixels, size)
        return Found(images, from_numpy(rows[:, 0].astype(np.int64)), CIFAR10_CLASSES, CIFAR10_NAMES)
    if split == "all":
        raise InputError("split", split, "train or test with a folder of two .safetensors files")
    return _of_cifar10_file(_cifar10_file(source, folder, split), "all", size)


def _cifar10_rows(file: Path) -> np.ndarray:
    if not file.exists():
        raise InputError("data", str(file), "a file that is there", "CIFAR-10's binary version has six.")
    data = np.frombuffer(read_bytes(file, MOST_CIFAR10_BYTES, "data"), dtype=np.uint8)
    if data.size == 0 or data.size % CIFAR10_ROW:
        raise InputError("data", str(file), f"rows of {CIFAR10_ROW} bytes", f"It has {data.size} bytes.")
    rows = data.reshape(-1, CIFAR10_ROW)
    _check_cifar10(int(rows[:, 0].max()), file)
    return rows


def _check_cifar10(largest: int, file: Path) -> None:
    if largest >= CIFAR10_CLASSES:
        raise InputError("data", str(file), f"labels from 0 to {CIFAR10_CLASSES - 1}", f"It has {largest}.")


def _cifar10_file(source: str, folder: Path, split: str) -> Path:
    found = sorted(folder.glob(f"cifar10*{split}*.safetensors"))
    if len(found) != 1:
        expected = f"{CIFAR10_FILES[split][0]}, or one file cifar10*{split}*.safetensors, in the folder"
        raise InputError("data", source, expected, f"There are {len(found)} of these." if found else "")
    return found[0]


def _of_cifar10_file(path: Path, split: str, size: ImageSize) -> Found:
    found = _of_arrays(path, split, size)
    _check_cifar10(found.classes - 1, path)
    return replace(found, classes=CIFAR10_CLASSES, names=CIFAR10_NAMES)


def of_path(path: Path, split: str, size: ImageSize) -> Found:
    """A folder of classes, or a file of arrays."""
    if path.is_dir():
        return _of_folder(path, split, size)
    if path.suffix in ARRAY_FILES:
        return _of_arrays(path, split, size)
    expected = "synthetic, cifar10, cifar10:PATH, a folder of class folders, or an .npz or .safetensors file"
    raise InputError("data", str(path), expected, "" if path.exists() else "There is no such file or folder.")


def _of_arrays(path: Path, split: str, size: ImageSize) -> Found:
    if not path.exists():
        raise InputError("data", str(path), "a file that is there")
    arrays = read_arrays(path, (*IMAGE_ARRAYS, "labels"))
    labels, images = arrays.get("labels", np.zeros(0)), arrays.get("images")
    count = images.shape[0] if images is not None and images.ndim else arrays.get("offsets", np.zeros(1)).size - 1
    whole = count > 0 and labels.shape == (count,) and np.issubdtype(labels.dtype, np.integer)
    if not whole or labels.min() < 0 or labels.max() > MOST_CLASSES:
        raise InputError("data", str(path), f"labels: an integer of at least 0 for each of its {count} images")
    own = from_numpy(labels.astype(np.int64))
    chosen = _part_of(own, split)
    return Found(Arrays(arrays, path, chosen, size), own[chosen], int(own.max()) + 1)


def _of_folder(path: Path, split: str, size: ImageSize) -> Found:
    own = split_folders(path)
    if own:
        classes = sorted({name for folder in own.values() for name in class_folders(folder)})
        wanted = [folder for part, folder in own.items() if split in (part, "all")]
        if not wanted:
            raise InputError("data", str(path), f"a folder {split!r} in it, beside {', '.join(own)}")
        paths, labels = _listed(wanted, classes)
    else:
        classes = class_folders(path)
        paths, labels = _listed([path], classes)
        chosen = _part_of(labels, split)
        paths, labels = [paths[i] for i in chosen], labels[chosen]
    if not classes:
        todo = "Move the images of each class into a folder with the class's name." if _has_images(path) else ""
        raise InputError("data", str(path), "a folder for each class, with images in it", todo)
    return Found(Files(tuple(paths), size), labels, len(classes), tuple(classes), tuple(paths))


def split_folders(path: Path) -> dict[str, Path]:
    """The folders of a source that has splits of its own: `train`, and the first there is of `test`, `val`, `valid`."""
    if not (path / "train").is_dir():
        return {}
    test = next((path / name for name in ("test", "val", "valid") if (path / name).is_dir()), None)
    return {"train": path / "train"} | ({} if test is None else {"test": test})


def class_folders(path: Path) -> list[str]:
    """Names of the folders in a folder that have images in or below them, sorted; hidden ones are left out."""
    found = sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    return [name for name in found if _has_images(path / name)]


def _has_images(folder: Path) -> bool:
    known = extensions()
    return any(p.suffix.lower() in known for p in folder.rglob("*"))


def _listed(folders: Sequence[Path], classes: Sequence[str]) -> tuple[list[Path], torch.Tensor]:
    """All image files below the class folders, with their labels."""
    paths: list[Path] = []
    labels: list[int] = []
    for folder in folders:
        for label, name in enumerate(classes):
            found = image_files(folder / name)
            paths += found
            labels += [label] * len(found)
    return paths, torch.tensor(labels, dtype=torch.int64)


def _part_of(labels: torch.Tensor, split: str) -> list[int]:
    """Indices of a split where the source has none: of each class, every tenth image is for testing."""
    if split == "all":
        return list(range(len(labels)))
    return [
        index for index, place in enumerate(places(labels)) if (place % HELD_OUT == HELD_OUT - 1) == (split == "test")
    ]


def places(labels: torch.Tensor) -> list[int]:
    """The how-manieth of its class each image is, from 0."""
    seen: dict[int, int] = {}
    places: list[int] = []
    label: int
    for label in to_list(labels):
        places.append(seen.get(label, 0))
        seen[label] = places[-1] + 1
    return places
