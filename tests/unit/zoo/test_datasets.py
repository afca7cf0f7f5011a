"""Data sets: every source gives the images and labels that are in it, in one form; what is not whole is named."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from convoy.errors import InputError
from convoy.zoo import Dataset, Preprocessing, load_dataset, own_splits
from convoy.zoo import pixels as pixels_module

PLAIN = Preprocessing(32, (0.0,) * 3, (1 / 255,) * 3)
"""Pixels as they are, 0 to 255."""

SMALL = Preprocessing(8, (0.0,) * 3, (1 / 255,) * 3)


def everything(dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """All images and labels, in order, by batches of three."""
    parts = list(dataset.batches(3))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def random_pixels(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def write_batch(path: Path, labels: list[int], seed: int = 0) -> np.ndarray:
    """A file of CIFAR-10's binary version; its pixels."""
    pixels = random_pixels(len(labels), seed)
    path.write_bytes(b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels, pixels, strict=True)))
    return pixels


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number in range(1, 6):
        write_batch(folder / f"data_batch_{number}.bin", [number, 2 * number - 1], number)
    write_batch(folder / "test_batch.bin", [9, 0, 3], 6)
    return tmp_path


def jpegs(count: int, size: tuple[int, int] = (32, 32)) -> dict[str, np.ndarray]:
    """Images of one colour each, as the bytes of PNG files one behind the other; image i is of class i % 4."""
    files = []
    for index in range(count):
        file = io.BytesIO()
        Image.new("RGB", size, (index, 2 * index, 255 - index)).save(file, "PNG")
        files.append(np.frombuffer(file.getvalue(), np.uint8))
    ends = np.cumsum([0, *map(len, files)])
    return {"jpeg": np.concatenate(files), "offsets": ends, "labels": np.arange(count) % 4}


def folders(root: Path, counts: dict[str, int], size: int = 8) -> Path:
    for number, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (size, size), (10 * number, index, 7)).save(root / name / f"{index:02}.png")
    return root


def test_cifar10s_binary_files_as_they_are(binary: Path) -> None:
    pixels = random_pixels(3, 6)
    for source in (f"cifar10:{binary}", f"cifar10:{binary / 'cifar-10-batches-bin'}"):
        test = load_dataset(source, "test", preprocessing=PLAIN, classes=10)
        x, y = everything(test)
        torch.testing.assert_close(x, torch.from_numpy(pixels).float())
        assert x.is_contiguous()
        assert (y.tolist(), test.classes, y.dtype) == ([9, 0, 3], 10, torch.int64)
        train = load_dataset(source, preprocessing=PLAIN)
        assert everything(train)[1].tolist() == [1, 1, 2, 3, 3, 5, 4, 7, 5, 9]
    assert len(load_dataset(f"cifar10:{binary}", "all", preprocessing=PLAIN)) == 13


def test_cifar10_alone_is_looked_for_where_archives_are_unpacked(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(binary)
    assert len(load_dataset("cifar10", "test", preprocessing=PLAIN)) == 3
    monkeypatch.chdir("/")
    with pytest.raises(InputError, match=r"cifar-10-binary.tar.gz there, or say where it is: cifar10:PATH"):
        load_dataset("cifar10", "test", preprocessing=PLAIN)


def test_cifar10s_images_for_a_model_of_another_size(binary: Path) -> None:
    x, _ = everything(load_dataset(f"cifar10:{binary}", "test", preprocessing=SMALL))
    assert x.shape == (3, 3, 8, 8)
    assert 50 < float(x.mean()) < 200


def test_arrays_of_files_and_of_pixels(tmp_path: Path) -> None:
    arrays = jpegs(20)
    save_file(arrays, tmp_path / "cifar10_train_20.safetensors")
    save_file(arrays, tmp_path / "cifar10_test_20.safetensors")
    np.savez(tmp_path / "a.npz", images=random_pixels(5), labels=np.array([2, 0, 1, 1, 0]))
    for source, split in (
        (f"cifar10:{tmp_path}", "train"),
        (f"cifar10:{tmp_path}", "test"),
        (f"cifar10:{tmp_path / 'cifar10_test_20.safetensors'}", "all"),
    ):
        found = load_dataset(source, split, preprocessing=PLAIN)
        x, y = everything(found)
        assert found.classes == 10
        torch.testing.assert_close(x[:, :, 5, 6], torch.tensor([[i, 2 * i, 255 - i] for i in range(20)]).float())
        assert y.tolist() == [i % 4 for i in range(20)]
    with pytest.raises(InputError, match="train or test with a folder of two"):
        load_dataset(f"cifar10:{tmp_path}", "all", preprocessing=PLAIN)
    plain = load_dataset(str(tmp_path / "a.npz"), "all", preprocessing=PLAIN)
    assert plain.classes == 3
    torch.testing.assert_close(everything(plain)[0], torch.from_numpy(random_pixels(5)).float())


def test_large_arrays_are_decoded_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(jpegs(9), tmp_path / "a.safetensors")
    kept = load_dataset(str(tmp_path / "a.safetensors"), "all", preprocessing=PLAIN)
    monkeypatch.setattr(pixels_module, "IN_MEMORY_BYTES", 100)
    read = load_dataset(str(tmp_path / "a.safetensors"), "all", preprocessing=PLAIN)
    assert type(kept.images) is not type(read.images)
    for one, other in zip(everything(kept), everything(read), strict=True):
        assert torch.equal(one, other)


def test_a_folder_with_splits(tmp_path: Path) -> None:
    folders(tmp_path / "train", {"ant": 3, "bee": 2})
    folders(tmp_path / "val", {"bee": 1, "cow": 2})
    assert own_splits(str(tmp_path))
    train = load_dataset(str(tmp_path), "train", preprocessing=SMALL)
    x, y = everything(train)
    assert (train.classes, y.tolist()) == (3, [0, 0, 0, 1, 1])
    assert x[:, 1, 0, 0].tolist() == [0, 1, 2, 0, 1]
    assert everything(load_dataset(str(tmp_path), "test", preprocessing=SMALL))[1].tolist() == [1, 2, 2]
    assert len(load_dataset(str(tmp_path), "all", preprocessing=SMALL)) == 8


def test_a_source_without_splits_holds_every_tenth_image_of_a_class_out(tmp_path: Path) -> None:
    folders(tmp_path, {"ant": 21, "bee": 10, "cow": 3})
    assert not own_splits(str(tmp_path))
    parts = {split: everything(load_dataset(str(tmp_path), split, preprocessing=SMALL)) for split in ("train", "test")}
    assert parts["test"][1].tolist() == [0, 0, 1]
    assert parts["test"][0][:, 1, 0, 0].tolist() == [9, 19, 9]
    assert len(parts["train"][1]) == 31
    seen = {(int(y), round(float(g))) for x, ys in parts.values() for y, g in zip(ys, x[:, 1, 0, 0], strict=True)}
    assert len(seen) == 34


def test_a_limit_takes_the_first_images_of_each_class(tmp_path: Path) -> None:
    folders(tmp_path, {"ant": 5, "bee": 5, "cow": 1})
    x, y = everything(load_dataset(str(tmp_path), "all", preprocessing=SMALL, limit=6))
    assert y.tolist() == [0, 0, 0, 1, 1, 2]
    assert x[:, 1, 0, 0].tolist() == [0, 1, 2, 0, 1, 0]
    assert len(load_dataset(str(tmp_path), "all", preprocessing=SMALL, limit=99)) == 11


def test_synthetic_images_are_seeded_and_can_be_told_apart() -> None:
    train = load_dataset("synthetic:200", preprocessing=SMALL, classes=5)
    x, y = everything(train)
    assert (len(train), train.classes, y[:7].tolist()) == (200, 5, [0, 1, 2, 3, 4, 0, 1])
    assert torch.equal(x, everything(load_dataset("synthetic:200", preprocessing=SMALL, classes=5))[0])
    test_x, test_y = everything(load_dataset("synthetic", "test", preprocessing=SMALL, classes=5))
    assert len(test_x) == 256
    means = torch.stack([x[y == label].mean(0) for label in range(5)])
    nearest = (test_x[:, None] - means).square().sum((2, 3, 4)).argmin(1)
    assert float((nearest == test_y).float().mean()) > 0.95
    assert not any(torch.equal(a, b) for a in test_x[:5] for b in x[:5])


def test_batches_normalise_by_channel() -> None:
    raw, _ = everything(load_dataset("synthetic:4", preprocessing=SMALL))
    wanted = Preprocessing(8, (0.5, 0.25, 0.0), (0.5, 1.0, 2.0))
    found, _ = everything(load_dataset("synthetic:4", preprocessing=wanted))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (wanted.mean, wanted.std))
    torch.testing.assert_close(found, (raw / 255 - mean) / std)


def test_a_seed_is_an_order_and_an_augmentation() -> None:
    dataset = load_dataset("synthetic:50", preprocessing=SMALL)

    def passed(**options: object) -> tuple[torch.Tensor, torch.Tensor]:
        parts = list(dataset.batches(8, **options))  # type: ignore[arg-type]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    plain, shuffled, augmented = passed(), passed(seed=3), passed(seed=3, augment=True)
    assert plain[1].tolist() == [i % 10 for i in range(50)]
    assert shuffled[1].tolist() != plain[1].tolist()
    assert sorted(shuffled[1].tolist()) == sorted(plain[1].tolist())
    assert torch.equal(shuffled[1], augmented[1])
    assert not torch.equal(shuffled[0], augmented[0])
    assert torch.equal(augmented[0], passed(seed=3, augment=True)[0])
    assert not torch.equal(augmented[0], passed(seed=4, augment=True)[0])


def test_a_pass_resumes_where_it_was_left() -> None:
    dataset = load_dataset("synthetic:50", preprocessing=SMALL)
    whole = list(dataset.batches(8, seed=3, augment=True))
    rest = list(dataset.batches(8, seed=3, augment=True, start=4))
    assert len(whole) == dataset.batch_count(8) == 7
    assert len(whole[-1][1]) == 2
    for one, other in zip(whole[4:], rest, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert [len(y) for _, y in dataset.batches(8, drop_last=True)] == [8] * dataset.batch_count(8, drop_last=True)


def test_augmentation_turns_and_moves_whole_images() -> None:
    pixels = torch.randint(1, 256, (64, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = pixels_module.augmented(pixels, torch.Generator().manual_seed(1))
    turned, moves = 0, set()
    for before, after in zip(pixels, found, strict=True):
        place = [
            (flip, dy, dx)
            for flip in (False, True)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            if torch.equal(after, moved(before.flip(2) if flip else before, dy, dx))
        ]
        assert len(place) == 1
        turned += place[0][0]
        moves.add(place[0][1:])
    assert 16 < turned < 48
    assert len(moves) > 12


def moved(image: torch.Tensor, dy: int, dx: int) -> torch.Tensor:
    """An image moved, black coming in."""
    out = torch.zeros_like(image)
    h, w = image.shape[1:]
    out[:, max(0, dy) : h + min(0, dy), max(0, dx) : w + min(0, dx)] = image[
        :, max(0, -dy) : h + min(0, -dy), max(0, -dx) : w + min(0, -dx)
    ]
    return out


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("synthetic:0", "synthetic:N with N of at least 1"),
        ("synthetic:many", "synthetic:N with N of at least 1"),
        ("cifar10:absent", "a folder that is there"),
        ("cifar10:absent.safetensors", "a file that is there"),
        ("cifar10:empty", "data_batch_1.bin, or one file"),
        ("cifar10:short", "rows of 3073 bytes"),
        ("cifar10:labels", "labels from 0 to 9. It has 10."),
        ("cifar10:few", "CIFAR-10's binary version has six"),
        ("cifar10:eleven.npz", "labels from 0 to 9"),
        ("nobody", "a folder of class folders, or an .npz or .safetensors file"),
        ("empty", "a folder for each class, with images in it"),
        ("unlabelled.npz", "an integer of at least 0 for each of its 2 images"),
        ("fewer.npz", "an integer of at least 0 for each of its 2 images"),
        ("negative.npz", "an integer of at least 0 for each of its 2 images"),
        ("noise.npz", "a whole .npz file"),
        ("two", "at most the 1 classes that the model tells apart"),
        ("onlytrain", "a folder 'test' in it, beside train"),
    ],
)
def test_what_is_not_whole_is_named(
    source: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "short", "labels", "few"):
        Path(name).mkdir()
    Path("short/data_batch_1.bin").write_bytes(b"1234")
    for number in range(1, 6):
        write_batch(Path(f"labels/data_batch_{number}.bin"), [3, 10])
    write_batch(Path("few/data_batch_1.bin"), [3])
    folders(Path("two"), {"ant": 1, "bee": 1})
    folders(Path("onlytrain/train"), {"ant": 1})
    images = random_pixels(2)
    np.savez("unlabelled.npz", images=images)
    np.savez("fewer.npz", images=images, labels=np.zeros(1, np.int64))
    np.savez("negative.npz", images=images, labels=np.array([0, -1]))
    np.savez("eleven.npz", images=images, labels=np.array([0, 10]))
    Path("noise.npz").write_bytes(b"noise")
    split = "test" if source == "onlytrain" else "all" if source in ("two", "cifar10:eleven.npz") else "train"
    with pytest.raises(InputError, match=r"^(data|input): got") as caught:
        load_dataset(source, split, preprocessing=SMALL, classes=1 if source == "two" else None)
    assert expected in str(caught.value)


def test_arguments_are_checked() -> None:
    dataset = load_dataset("synthetic:5", preprocessing=SMALL)
    for options in ({"batch": 0}, {"batch": 2, "augment": True}, {"batch": 2, "start": 4}, {"batch": 2, "start": -1}):
        with pytest.raises(InputError, match=r"batch|augment|start"):
            dataset.batches(**options)  # type: ignore[arg-type]
    for options in ({"split": "rest"}, {"limit": 0}, {"classes": 0}):
        with pytest.raises(InputError, match=r"split|limit|classes"):
            load_dataset("synthetic", preprocessing=SMALL, **options)  # type: ignore[arg-type]


def test_offsets_that_point_past_the_bytes_are_refused(tmp_path: Path) -> None:
    arrays = jpegs(4)
    assert all(a <= b for a, b in pairwise(arrays["offsets"].tolist()))
    save_file(arrays | {"offsets": arrays["offsets"] + 9}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="rising positions"):
        load_dataset(str(tmp_path / "a.safetensors"), "all", preprocessing=PLAIN)


def test_images_of_a_data_set_may_be_rectangles() -> None:
    found = load_dataset("synthetic:6", preprocessing=Preprocessing((8, 12)), classes=3)
    (x, y), *_ = found.batches(6)
    assert x.shape == (6, 3, 8, 12)
    assert y.shape == (6,)
