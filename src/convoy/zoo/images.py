"""Images to one tensor: files, folders, and arrays of images in .npz and .safetensors."""

from __future__ import annotations

import io
import itertools
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from convoy.errors import InputError
from convoy.zoo.example import IMAGENET_MEAN, IMAGENET_STD
from convoy.zoo.models import parse_dtype

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_IMAGES = 1024
"""A batch beyond this is a slip (a whole data set's folder): it must be asked for by number."""

CROP_FRACTION = 0.875
"""Side of the crop over the short side before it, as torchvision's classifiers were evaluated (224 of 256)."""


def load_images(
    paths: Sequence[str | Path],
    *,
    size: int,
    batch: int | None = None,
    dtype: str = "fp32",
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> torch.Tensor:
    """Read images as one batch [n, 3, size, size], contiguous, normalised by channel.

    Each image is turned upright (EXIF), made RGB, resized so that its short side is size / 0.875 (bilinear), and cropped
    in the middle; one that is size x size already is taken as it is.

    Args:
        paths: image files; folders (all images below, in order of their paths); .npz or .safetensors with `images`
            (uint8, [n, 3, h, w]) or with `jpeg` (uint8, all files' bytes) and `offsets` (integers, [n + 1]).
        size: height and width of the result, pixels.
        batch: take the first so many; None: all.
        dtype: of the result; the arithmetic is fp32.
        mean: by channel, of RGB in [0, 1].
        std: by channel.

    Raises:
        InputError: naming the file that is not there or is no image, or too few images.
    """
    kind = parse_dtype(dtype)
    for name, value in (("size", size), ("batch", batch)):
        if value is not None and value < 1:
            raise InputError(name, value, "an integer of at least 1")
    if len(mean) != 3 or len(std) != 3 or not all(s > 0 for s in std):
        raise InputError("mean, std", (tuple(mean), tuple(std)), "three numbers each, std above 0")
    images = itertools.chain.from_iterable(_images(Path(path)) for path in paths)
    arrays = [_square(image, size) for image in itertools.islice(images, batch or MOST_IMAGES + 1)]
    if not arrays:
        raise InputError("input", [str(p) for p in paths], "at least one image")
    if batch is not None and len(arrays) < batch:
        raise InputError("batch", batch, f"at most the {len(arrays)} images that the input holds")
    if batch is None and len(arrays) > MOST_IMAGES:
        raise InputError(
            "input", [str(p) for p in paths], f"at most {MOST_IMAGES} images", "Give batch to take the first."
        )
    pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).to(torch.float32).div_(255.0)
    pixels = pixels.sub_(torch.tensor(mean).view(1, 3, 1, 1)).div_(torch.tensor(std).view(1, 3, 1, 1))
    return pixels.to(kind).contiguous()


def _images(path: Path) -> Iterator[Image]:
    if path.is_dir():
        from PIL.Image import registered_extensions

        known = registered_extensions()
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in known and p.is_file())
        if not found:
            raise InputError("input", str(path), "a folder with images in it")
        for file in found:
            yield _decode(file, str(file))
    elif not path.is_file():
        raise InputError("input", str(path), "a file or folder that is there")
    elif path.suffix == ".npz":
        yield from _of_arrays(_read_npz(path), path)
    elif path.suffix == ".safetensors":
        yield from _of_arrays(_read_safetensors(path), path)
    else:
        yield _decode(path, str(path))


def _decode(source: Path | io.BytesIO, name: str) -> Image:
    from PIL import Image, ImageOps

    try:
        with Image.open(source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise InputError("input", name, "an image that Pillow can read", f"It says: {_first_line(error)}") from error


def _square(image: Image, size: int) -> np.ndarray:
    from PIL.Image import Resampling

    if image.size != (size, size):
        short = max(size, round(size / CROP_FRACTION))
        scale = short / min(image.size)
        width, height = (max(short, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), Resampling.BILINEAR).crop((left, top, left + size, top + size))
    return np.asarray(image, dtype=np.uint8)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in ("images", "jpeg", "offsets") if name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise InputError("input", str(path), "a whole .npz file", f"Reading it failed: {_first_line(error)}") from error


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as archive:
            return {name: archive.get_tensor(name) for name in ("images", "jpeg", "offsets") if name in archive.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        expected = "a whole .safetensors file"
        raise InputError("input", str(path), expected, f"Reading it failed: {_first_line(error)}") from error


def _of_arrays(arrays: dict[str, np.ndarray], path: Path) -> Iterator[Image]:
    from PIL import Image

    images, jpeg, offsets = (arrays.get(name) for name in ("images", "jpeg", "offsets"))
    if images is not None:
        if images.ndim != 4 or images.shape[1] != 3 or images.dtype != np.uint8 or 0 in images.shape[2:]:
            shown = f"{images.dtype}{list(images.shape)}"
            raise InputError("input", f"{path}: images {shown}", "images as uint8 [n, 3, h, w]")
        for image in images:
            yield Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    elif jpeg is not None and offsets is not None:
        ends = offsets.astype(np.int64) if np.issubdtype(offsets.dtype, np.integer) else np.empty(0)
        whole = jpeg.ndim == 1 and jpeg.dtype == np.uint8 and ends.ndim == 1 and ends.size > 0
        if not whole or ends[0] < 0 or ends[-1] > jpeg.size or (np.diff(ends) < 0).any():
            raise InputError("input", str(path), "jpeg as uint8 bytes and offsets as rising positions in it")
        for index, (start, end) in enumerate(itertools.pairwise(ends.tolist())):
            yield _decode(io.BytesIO(jpeg[start:end].tobytes()), f"{path}: image {index}")
    else:
        raise InputError("input", str(path), "a file with `images`, or with `jpeg` and `offsets`")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
