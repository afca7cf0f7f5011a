"""Images to one tensor: files, folders, and arrays of images in .npz and .safetensors."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch

from convoy.errors import InputError
from convoy.typed_torch import from_numpy
from convoy.untrusted import escape_controls, open_file
from convoy.zoo.example import IMAGENET_MEAN, IMAGENET_STD
from convoy.zoo.image_size import ImageSize, sides
from convoy.zoo.model_names import parse_dtype
from convoy.zoo.npz import MOST_BYTES, read_npz

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_IMAGES = 1024
"""A batch beyond this is a slip (a whole data set's folder): it must be asked for by number."""

ARRAY_FILES = (".npz", ".safetensors")
"""Files that hold many images as arrays."""

IMAGE_ARRAYS = ("images", "jpeg", "offsets")
"""Their arrays: pixels, or the bytes of files and where each begins."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Accepted image formats, by Pillow's names. Pillow reads others too, some of them by starting other programs."""

MOST_IMAGE_BYTES = 256 << 20
"""Of one image file."""

MOST_PIXELS = 64_000_000
"""Of one image, before and after it is resized: enough for cameras. A small file can claim a size a hundred times as large."""

CROP_FRACTION = 0.875
"""Side of the crop over the short side before it, as torchvision's classifiers were evaluated (224 of 256)."""


def load_images(
    paths: Sequence[str | Path],
    *,
    size: ImageSize,
    batch: int | None = None,
    dtype: str = "fp32",
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    on_unreadable: Callable[[InputError], None] | None = None,
) -> torch.Tensor:
    """Read images as one batch [n, 3, height, width], contiguous, normalised by channel.

    Each image is turned upright (EXIF), made RGB, resized (bilinear, its proportions kept) so that both sides are at least
    those of the result divided by 0.875, and cropped in the middle. An image of the right size is taken as it is.

    Args:
        paths: image files; folders (all images below, in order of their paths); .npz or .safetensors with `images`
            (uint8, [n, 3, h, w]) or with `jpeg` (uint8, all files' bytes) and `offsets` (integers, [n + 1]).
        size: of the result, pixels; one number for square images, or (height, width).
        batch: take the first so many; None: all.
        dtype: of the result; the arithmetic is fp32.
        mean: by channel, of RGB in [0, 1].
        std: by channel.
        on_unreadable: given the error of each file in a folder that cannot be read; such files are left out. None: raise it.

    Raises:
        InputError: naming the file that is not there or is no image, or too few images.
    """
    kind = parse_dtype(dtype)
    sides(size)
    if batch is not None and batch < 1:
        raise InputError("batch", batch, "an integer of at least 1")
    if len(mean) != 3 or len(std) != 3 or not all(s > 0 for s in std):
        raise InputError("mean, std", (tuple(mean), tuple(std)), "three numbers each, std above 0")
    images = itertools.chain.from_iterable(_images(Path(path), on_unreadable) for path in paths)
    arrays = [center_crop(image, size) for image in itertools.islice(images, batch or MOST_IMAGES + 1)]
    if not arrays:
        raise InputError("input", [str(p) for p in paths], "at least one image")
    if batch is not None and len(arrays) < batch:
        raise InputError("batch", batch, f"at most the {len(arrays)} images that the input holds")
    if batch is None and len(arrays) > MOST_IMAGES:
        raise InputError(
            "input", [str(p) for p in paths], f"at most {MOST_IMAGES} images", "Give batch to take the first."
        )
    pixels = from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).to(torch.float32).div_(255.0)
    pixels = pixels.sub_(torch.tensor(mean).view(1, 3, 1, 1)).div_(torch.tensor(std).view(1, 3, 1, 1))
    return pixels.to(kind).contiguous()


def _images(path: Path, on_unreadable: Callable[[InputError], None] | None) -> Iterator[Image]:
    if path.is_dir():
        found = image_files(path)
        if not found:
            raise InputError("input", str(path), "a folder with images in it")
        for file in found:
            try:
                image = decode(file, str(file))
            except InputError as error:
                if on_unreadable is None:
                    raise
                on_unreadable(error)
                continue
            yield image
    elif not path.exists():
        raise InputError("input", str(path), "a file or folder that is there")
    elif path.suffix in ARRAY_FILES:
        yield from images_of_arrays(read_arrays(path, IMAGE_ARRAYS), path)
    else:
        yield decode(path, str(path))


def image_files(folder: Path) -> list[Path]:
    """All image files in and below a folder, in the order of their paths."""
    known = extensions()
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in known and p.is_file())


def extensions() -> frozenset[str]:
    """Endings of the names of image files: `.jpg`, `.png`, ..."""
    from PIL.Image import registered_extensions

    return frozenset(ending for ending, kind in registered_extensions().items() if kind in FORMATS)


def decode(source: Path | io.BytesIO, name: str) -> Image:
    """An image file, upright and in RGB; raises InputError naming it."""
    if isinstance(source, Path):
        with open_file(source, MOST_IMAGE_BYTES, "input") as file:
            return _decoded(file, name)
    return _decoded(source, name)


def _decoded(file: IO[bytes], name: str) -> Image:
    from PIL import Image, ImageOps, UnidentifiedImageError

    expected = "an image that Pillow can read: " + ", ".join(FORMATS)
    try:
        with Image.open(file, formats=FORMATS) as image:
            if image.width * image.height <= MOST_PIXELS:
                return _rgb(ImageOps.exif_transpose(image))
            shown = f"{image.width}x{image.height}"
    except UnidentifiedImageError as error:  # its own words name no file
        raise InputError("input", name, expected) from error
    except Exception as error:  # Pillow's readers of damaged files fail in many ways
        raise InputError("input", name, expected, f"It says: {_first_line(error)}") from error
    raise InputError("input", name, f"an image of at most {MOST_PIXELS // 1_000_000} megapixels", f"It is {shown}.")


def _rgb(image: Image) -> Image:
    """The image in RGB; 16-bit grey is scaled to 8 bits, where Pillow alone would cut everything above 255 to white."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is not known")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        bits = 8 if values.max(initial=0) > 255 or image.mode != "I" else 0
        return image_of(np.clip(values >> bits, 0, 255).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def image_of(pixels: np.ndarray) -> Image:
    """A Pillow image of uint8 pixels, [h, w] or [h, w, 3]."""
    from PIL import Image

    return Image.fromarray(pixels)


def center_crop(image: Image, size: ImageSize) -> np.ndarray:
    """The image resized and cropped in the middle, uint8 [height, width, 3]; one of that size is taken as it is."""
    from PIL.Image import Resampling

    wanted_h, wanted_w = sides(size)
    if image.size != (wanted_w, wanted_h):
        width, height = _resized(image.size, (wanted_w, wanted_h))
        if width * height > MOST_PIXELS:
            expected = f"images that have at most {MOST_PIXELS // 1_000_000} megapixels when they are resized"
            raise InputError("input", f"{image.width}x{image.height}", expected, f"It would be {width}x{height}.")
        left, top = round((width - wanted_w) / 2), round((height - wanted_h) / 2)
        image = image.resize((width, height), Resampling.BILINEAR).crop((left, top, left + wanted_w, top + wanted_h))
    return np.asarray(image, dtype=np.uint8)


def _resized(size: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int]:
    """Width and height before the crop. Rounded as by torchvision's `Resize`: the same pixels come out."""
    (width, height), (least_w, least_h) = size, [max(side, round(side / CROP_FRACTION)) for side in wanted]
    if least_w * height >= least_h * width:
        return least_w, max(least_h, least_w * height // width)
    return max(least_w, least_h * width // height), least_h


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Those of `names` that an .npz or .safetensors file holds; nothing in it is unpickled. Raises InputError."""
    if path.suffix == ".npz":
        return read_npz(path, names)
    from safetensors import safe_open

    with open_file(path, MOST_BYTES, "input"):
        pass  # a regular file: the library would wait for the writer of a pipe
    try:
        with cast("Any", safe_open)(path, framework="numpy") as tensors:
            return {name: tensors.get_tensor(name) for name in names if name in tensors.keys()}  # noqa: SIM118
    except Exception as error:  # everything: the library's own errors, and NumPy's for types that it does not know
        expected = f"a whole {path.suffix} file"
        raise InputError("input", str(path), expected, f"Reading it failed: {_first_line(error)}") from error


def images_of_arrays(arrays: dict[str, np.ndarray], path: Path, wanted: Sequence[int] | None = None) -> Iterator[Image]:
    """The images of a file's arrays in order, or those that are `wanted`, by index; raises InputError naming the file."""
    from PIL import Image

    images, jpeg, offsets = (arrays.get(name) for name in ("images", "jpeg", "offsets"))
    if images is not None:
        if images.ndim != 4 or images.shape[1] != 3 or images.dtype != np.uint8 or 0 in images.shape[2:]:
            shown = f"{images.dtype}{list(images.shape)}"
            raise InputError("input", f"{path}: images {shown}", "images as uint8 [n, 3, h, w]")
        for index in range(len(images)) if wanted is None else wanted:
            yield Image.fromarray(np.ascontiguousarray(images[index].transpose(1, 2, 0)))
    elif jpeg is not None and offsets is not None:
        ends = offsets.astype(np.int64) if np.issubdtype(offsets.dtype, np.integer) else np.empty(0)
        whole = jpeg.ndim == 1 and jpeg.dtype == np.uint8 and ends.ndim == 1 and ends.size > 0
        if not whole or ends[0] < 0 or ends[-1] > jpeg.size or (np.diff(ends) < 0).any():
            raise InputError("input", str(path), "jpeg as uint8 bytes and offsets as rising positions in it")
        for index in range(ends.size - 1) if wanted is None else wanted:
            file = io.BytesIO(jpeg[ends[index] : ends[index + 1]].tobytes())
            yield decode(file, f"{path}: image {index}")
    else:
        raise InputError("input", str(path), "a file with `images`, or with `jpeg` and `offsets`")


def _first_line(error: BaseException) -> str:
    return escape_controls((str(error).strip().splitlines() or [type(error).__name__])[0])[:300]
