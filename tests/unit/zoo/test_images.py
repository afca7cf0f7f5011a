"""Images to one tensor: sizes, colours, turns, folders, arrays; what is no image is named."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from convoy.errors import InputError
from convoy.zoo import images as images_module
from convoy.zoo import load_images
from convoy.zoo.example import IMAGENET_MEAN, IMAGENET_STD
from convoy.zoo.torchvision_import import import_torchvision

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def flat(path: Path, colour: object, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
    """An image of one colour; `size` is width, height."""
    Image.new(mode, size, colour).save(path)  # type: ignore[arg-type]
    return path


def gradient(height: int, width: int) -> np.ndarray:
    """uint8 [h, w, 3] that tells every pixel apart by (row, column)."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows, columns, rows * 0 + 9], axis=-1).astype(np.uint8)


def test_an_image_of_the_size_wanted_is_taken_as_it_is(tmp_path: Path) -> None:
    pixels = gradient(10, 10)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = load_images([tmp_path / "a.png"], size=10, **PLAIN)
    assert found.shape == (1, 3, 10, 10)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert torch.equal((found[0] * 255).round().to(torch.uint8), torch.from_numpy(pixels).permute(2, 0, 1))


def test_normalised_by_channel(tmp_path: Path) -> None:
    path = flat(tmp_path / "a.png", (51, 102, 204))
    found = load_images([path], size=8, mean=(0.2, 0.1, 0.5), std=(1.0, 0.5, 0.25))
    torch.testing.assert_close(found[0, :, 0, 0], torch.tensor([0.0, 0.6, 1.2]))


@pytest.mark.parametrize("image", [(40, 20), (20, 40), (7, 9), (12, 8), (1, 1)])
def test_any_image_becomes_a_rectangle(tmp_path: Path, image: tuple[int, int]) -> None:
    found = load_images([flat(tmp_path / "a.png", (10, 20, 30), image)], size=(8, 12), **PLAIN)
    assert found.shape == (1, 3, 8, 12)
    assert torch.equal(found[0, :, 0, 0] * 255, torch.tensor([10.0, 20.0, 30.0]))
    with pytest.raises(InputError, match=r"size: got \(8, 0\)"):
        load_images([tmp_path / "a.png"], size=(8, 0), **PLAIN)


@pytest.mark.parametrize("size", [(40, 20), (20, 40), (300, 7), (3, 3), (1, 1), (8, 9)])
def test_any_size_becomes_a_square(tmp_path: Path, size: tuple[int, int]) -> None:
    found = load_images([flat(tmp_path / "a.png", (10, 20, 30), size)], size=8, **PLAIN)
    assert found.shape == (1, 3, 8, 8)
    torch.testing.assert_close(found[0, :, 4, 4] * 255, torch.tensor([10.0, 20.0, 30.0]))


def test_the_middle_is_what_is_kept(tmp_path: Path) -> None:
    pixels = np.zeros((64, 192, 3), np.uint8)
    pixels[:, 64:128] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert float(load_images([tmp_path / "a.png"], size=32, **PLAIN).min()) > 0.99


@pytest.mark.parametrize(
    "image", [(80, 70), (70, 81), (3000, 20), (20, 501), (257, 256), (500, 375), (9, 9), (224, 225)]
)
def test_pixels_are_those_of_torchvisions_transforms(tmp_path: Path, image: tuple[int, int]) -> None:
    import_torchvision()
    transforms = importlib.import_module("torchvision.transforms")
    pixels = np.random.default_rng(0).integers(0, 256, (image[1], image[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
    steps.append(transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD))
    found = load_images([tmp_path / "a.png"], size=224)
    torch.testing.assert_close(found[0], transforms.Compose(steps)(Image.open(tmp_path / "a.png")), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "colour", "wanted"),
    [
        ("L", 100, (100, 100, 100)),
        ("RGBA", (10, 20, 30, 128), (10, 20, 30)),
        ("LA", (100, 7), (100, 100, 100)),
        ("P", 0, (0, 0, 0)),
        ("1", 1, (255, 255, 255)),
    ],
)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str, colour: object, wanted: tuple[int, ...]) -> None:
    found = load_images([flat(tmp_path / "a.png", colour, mode=mode)], size=8, **PLAIN)
    assert tuple((found[0, :, 3, 3] * 255).round().int().tolist()) == wanted


def test_cmyk_and_jpeg(tmp_path: Path) -> None:
    path = flat(tmp_path / "a.jpg", (0, 0, 0, 0), mode="CMYK")
    assert float(load_images([path], size=8, **PLAIN).min()) > 0.98


def test_turned_upright_by_exif(tmp_path: Path) -> None:
    image = Image.fromarray(gradient(16, 16))
    exif = image.getexif()
    exif[0x0112] = 3  # turned by 180 degrees
    image.save(tmp_path / "a.png", exif=exif)
    image.save(tmp_path / "b.png")
    turned, plain = (load_images([tmp_path / name], size=16, **PLAIN) for name in ("a.png", "b.png"))
    assert torch.equal(turned, plain.flip(2, 3))


def test_a_folder_in_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    for value, name in enumerate(("b.png", "a.PNG", "deeper/0.jpg", "c.png")):
        Image.new("RGB", (8, 8), (value * 50,) * 3).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image", encoding="utf-8")
    found = load_images([tmp_path], size=8, **PLAIN)[:, 0, 0, 0] * 255
    assert [round(float(v) / 50) for v in found] == [1, 0, 3, 2]
    assert len(load_images([tmp_path], size=8, batch=2)) == 2
    assert len(load_images([tmp_path, tmp_path / "b.png"], size=8)) == 5


def test_dtype(tmp_path: Path) -> None:
    path = flat(tmp_path / "a.png", (1, 2, 3))
    assert load_images([path], size=8, dtype="bf16").dtype == torch.bfloat16
    with pytest.raises(InputError, match="dtype"):
        load_images([path], size=8, dtype="fp8")


def test_arrays_of_images(tmp_path: Path) -> None:
    pixels = np.ascontiguousarray(np.stack([gradient(8, 8).transpose(2, 0, 1)] * 3))
    pixels[1] += 5
    np.savez(tmp_path / "a.npz", images=pixels)
    save_file({"images": pixels}, tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        found = load_images([tmp_path / name], size=8, **PLAIN)
        assert np.array_equal((found.numpy() * 255).round().astype(np.uint8), pixels)


def test_arrays_of_jpeg_files(tmp_path: Path) -> None:
    parts = [flat(tmp_path / f"{i}.jpg", (i * 40,) * 3).read_bytes() for i in range(3)]
    data = {
        "jpeg": np.frombuffer(b"".join(parts), np.uint8),
        "offsets": np.cumsum([0, *map(len, parts)]).astype(np.int64),
    }
    np.savez(tmp_path / "a.npz", **data)
    found = load_images([tmp_path / "a.npz"], size=8, **PLAIN)[:, 0, 0, 0] * 255
    assert [round(float(v) / 40) for v in found] == [0, 1, 2]
    for name, wrong in (("end", [0, 10**6]), ("falls", [9, 3]), ("floats", [0.5, 1.5]), ("none", [])):
        np.savez(tmp_path / f"{name}.npz", jpeg=data["jpeg"], offsets=np.array(wrong))
        with pytest.raises(InputError, match="rising positions"):
            load_images([tmp_path / f"{name}.npz"], size=8)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("text.png", b"not an image", "an image that Pillow can read"),
        ("empty.jpg", b"", "an image that Pillow can read"),
        ("noise.npz", b"noise", "a whole .npz file"),
        ("noise.safetensors", b"noise", "a whole .safetensors file"),
    ],
)
def test_a_file_that_is_no_image(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=expected) as caught:
        load_images([tmp_path / name], size=8)
    assert name in str(caught.value)


def test_an_image_that_is_cut_short(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for name in ("a.png", "a.jpg"):
        Image.fromarray(noise).save(tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InputError, match=name):
            load_images([tmp_path / name], size=8)


@pytest.mark.parametrize(
    "array", [np.zeros((2, 8, 8, 3), np.uint8), np.zeros((2, 3, 8, 8)), np.zeros((2, 3, 0, 8), "u1")]
)
def test_arrays_of_another_form(tmp_path: Path, array: np.ndarray) -> None:
    np.savez(tmp_path / "a.npz", images=array)
    with pytest.raises(InputError, match="uint8"):
        load_images([tmp_path / "a.npz"], size=8)
    np.savez(tmp_path / "b.npz", pictures=array)
    with pytest.raises(InputError, match="a file with `images`"):
        load_images([tmp_path / "b.npz"], size=8)


def test_pickled_arrays_are_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match=r"a whole \.npz file"):
        load_images([tmp_path / "a.npz"], size=8)


def test_too_few_and_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(4):
        flat(tmp_path / f"{index}.png", (1, 2, 3))
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(images_module, "MOST_IMAGES", 3)
    for paths, words, expected in (
        ([], {}, "at least one image"),
        ([tmp_path / "empty"], {}, "a folder with images"),
        ([tmp_path / "absent"], {}, "a file or folder that is there"),
        ([tmp_path], {"batch": 5}, "at most the 4 images"),
        ([tmp_path], {}, "at most 3 images"),
        ([tmp_path], {"batch": 0}, "batch"),
        ([tmp_path], {"size": 0}, "size"),
        ([tmp_path], {"std": (1.0, 0.0, 1.0)}, "std above 0"),
        ([tmp_path], {"mean": (1.0,)}, "three numbers"),
    ):
        with pytest.raises(InputError, match=expected):
            load_images(paths, **{"size": 8, **words})  # type: ignore[arg-type]
    assert len(load_images([tmp_path], size=8, batch=4)) == 4
