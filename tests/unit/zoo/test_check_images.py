"""Every image file is read before work begins: files that cannot be are named, the others are the images of the data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convoy.errors import InputError
from convoy.zoo import Preprocessing, check_images, load_dataset, load_images
from convoy.zoo import pixels as pixels_module
from convoy.zoo.images import decode
from convoy.zoo.unlabelled import has_classes, unlabelled
from tests.unit.zoo.image_folders import ORIENTATION, add_odd_files, draw_folder

PLAIN = Preprocessing(20, (0.0,) * 3, (1 / 255,) * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = draw_folder(tmp_path_factory.mktemp("images") / "shapes", 4)
    add_odd_files(path)
    return path


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_cannot_be_read_is_named_and_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, in_memory: bool
) -> None:
    if not in_memory:
        monkeypatch.setattr(pixels_module, "IN_MEMORY_BYTES", 100)
    listed = load_dataset(str(folder), "all", preprocessing=PLAIN)
    checked, unreadable = check_images(listed)
    reasons = {image.file.name: image.reason for image in unreadable}
    assert reasons.keys() == {"damaged.png", "text.jpg"}
    assert "truncated" in reasons["damaged.png"]
    assert "expected an image that Pillow can read: BMP" in reasons["text.jpg"]
    assert (len(listed), len(checked)) == (19, 17)
    assert checked.files == tuple(file for file in listed.files if file.name not in reasons)
    assert checked.labels.tolist() == [{"circle": 0, "square": 1, "triangle": 2}[f.parent.name] for f in checked.files]
    for index, file in enumerate(checked.files):
        x, _ = next(checked.subset([index]).batches(1))
        assert torch.equal(x, load_images([file], size=20, mean=PLAIN.mean, std=PLAIN.std)), file


def test_images_of_arrays_are_left_as_they_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 3, 4, 4), np.uint8), labels=np.array([0, 1]))
    data = load_dataset(str(tmp_path / "a.npz"), "all", preprocessing=PLAIN)
    checked, unreadable = check_images(data)
    assert checked is data
    assert unreadable == ()


def test_grey_of_sixteen_bits_is_scaled_and_floating_point_refused(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 400).astype(np.uint16).reshape(20, 20)
    Image.fromarray(values).save(tmp_path / "grey.png")
    found = np.asarray(decode(tmp_path / "grey.png", "grey.png"))
    assert np.array_equal(found, np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, axis=2))
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(InputError, match="floating-point"):
        decode(tmp_path / "float.tif", "float.tif")


def test_a_turned_image_is_read_upright(tmp_path: Path) -> None:
    pixels = np.zeros((30, 20, 3), np.uint8)
    pixels[:, :10] = 255  # white on the left
    upright = np.rot90(pixels, -1)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(np.asarray(decode(tmp_path / "turned.png", "")), upright)


def test_a_folder_given_as_input_leaves_out_what_cannot_be_read(folder: Path) -> None:
    left_out: list[str] = []
    words = {"size": 8, "on_unreadable": lambda error: left_out.append(Path(error.value).name)}
    assert len(load_images([folder], **words)) == 17
    assert sorted(left_out) == ["damaged.png", "text.jpg"]
    assert len(load_images([folder], batch=5, **words)) == 5
    with pytest.raises(InputError, match=r"damaged\.png"):
        load_images([folder / "circle" / "damaged.png"], **words)  # one that is named is not left out
    with pytest.raises(InputError, match=r"damaged\.png"):
        load_images([folder], size=8)


def test_images_without_labels(folder: Path, tmp_path: Path) -> None:
    found = unlabelled([folder / "square", folder / "circle" / "00.png"], PLAIN)
    assert [file.name for file in found.files][-2:] == ["四角.png", "00.png"]
    assert set(found.labels.tolist()) == {-1}
    assert (has_classes(folder), has_classes(folder / "square")) == (True, False)
    np.savez(tmp_path / "a.npz", images=np.full((3, 3, 4, 4), 7, np.uint8))
    arrays = unlabelled([tmp_path / "a.npz"], PLAIN)
    assert (len(arrays), arrays.image_name(2)) == (3, "image 2")
    for paths, says in (
        ([folder / "nowhere"], "that is there"),
        ([tmp_path], "a folder with images"),
        ([tmp_path / "a.npz", folder], "one file of arrays"),
    ):
        with pytest.raises(InputError, match=says):
            unlabelled(paths, PLAIN)
