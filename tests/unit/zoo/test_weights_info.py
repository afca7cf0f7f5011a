"""A weights file says what its outputs stand for, and later commands build the net and number the classes by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from convoy.errors import InputError
from convoy.training.trainer.checkpoint import TrainingPosition, random_state, write_checkpoint
from convoy.zoo import Preprocessing, WeightsInfo, fit_head, load_dataset, load_model, read_info
from convoy.zoo.data_identity import data_tokens
from convoy.zoo.datasets import classes_of, has_test_images
from tests.unit.zoo.image_folders import draw_folder

SHAPES = ("circle", "square", "triangle")
SMALL = Preprocessing(8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("info") / "shapes", 10)


def net(outputs: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, outputs)).eval()


def test_words_come_back(tmp_path: Path) -> None:
    info = WeightsInfo(("円", "square"), (48, 64), frozenset({"0a", "1b"}), {"model": "net"})
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors", info.to_words())
    assert read_info(tmp_path / "a.safetensors") == info
    assert read_info("DEFAULT") == read_info(None) == read_info(tmp_path / "nowhere") == WeightsInfo()


@pytest.mark.parametrize(
    "words",
    [
        {"classes": "circle"},
        {"classes": "[]"},
        {"classes": '["a", "a"]'},
        {"classes": '["a", 1]'},
        {"classes": '[""]'},
        {"classes": "[" * 9},
        {"size": "0x8"},
        {"size": "99999x8"},
        {"size": "8"},
        {"trained_on": "../x"},
    ],
)
def test_malformed_words_are_refused_by_name(tmp_path: Path, words: dict[str, str]) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors", words)
    with pytest.raises(InputError, match="weights"):
        read_info(tmp_path / "a.safetensors")


def test_a_checkpoint_is_read_as_weights(tmp_path: Path) -> None:
    model = load_model("resnet20_cifar10", num_classes=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    about = WeightsInfo(SHAPES, 24).to_words()
    random = [random_state(torch.device("cpu"))]
    path = tmp_path / "net.checkpoint"
    write_checkpoint(path, model, optimizer, schedule, TrainingPosition(1, 0), random, about)
    read = load_model("resnet20_cifar10", weights=path)
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert (read_info(path).classes, read_info(path).size) == (SHAPES, 24)
    data = path.read_bytes()
    path.write_bytes(data[:-40] + bytes(byte ^ 255 for byte in data[-40:]))
    with pytest.raises(InputError, match="weights"):
        load_model("resnet20_cifar10", weights=path)


def test_the_last_layer_is_replaced_and_the_rest_is_not() -> None:
    model, x = net(), torch.zeros(1, 3, 8, 8)
    first, seed = model[0].weight, torch.get_rng_state()
    assert fit_head(model, 3, (x,), 10) == "3"  # not the convolution, which has ten outputs too
    assert model(x).shape == (1, 3)
    assert model[0].weight is first
    assert torch.equal(torch.get_rng_state(), seed)
    squeezenet = load_model("squeezenet1_1")
    assert fit_head(squeezenet, 5, (torch.zeros(1, 3, 64, 64),), 1000) == "classifier.1"
    assert squeezenet(torch.zeros(1, 3, 64, 64)).shape == (1, 5)


def test_heads_that_are_averaged_are_replaced_together() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.other = nn.Linear(12, 7), nn.Linear(12, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            return (self.head(x) + self.other(x)) / 2

    model, x = Two().eval(), torch.zeros(1, 3, 2, 2)
    assert fit_head(model, 4, (x,), 7) == "head, other"
    assert model(x).shape == (1, 4)


def test_a_net_without_such_a_layer_is_refused_and_unchanged() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.flatten(1)).reshape(-1, 7)

    model, x = Fixed().eval(), torch.zeros(1, 3, 2, 2)
    before = model.fc
    with pytest.raises(InputError, match=r"head: got 'fit'.*FILE\.py:FACTORY"):
        fit_head(model, 4, (x,), 7)
    assert model.fc is before


def test_labels_follow_the_names_that_the_weights_know(folder: Path, tmp_path: Path) -> None:
    words = {"preprocessing": SMALL, "classes": 3}
    assert load_dataset(str(folder), "all", **words).class_names == SHAPES
    turned = load_dataset(str(folder), "all", class_names=("triangle", "square", "circle"), **words)
    assert turned.labels.tolist() == [2] * 10 + [1] * 10 + [0] * 10
    two = draw_folder(tmp_path / "two", 2)
    (two / "square").rename(tmp_path / "elsewhere")
    assert load_dataset(str(two), "all", class_names=SHAPES, **words).labels.tolist() == [0, 0, 2, 2]
    (two / "circle").rename(two / "hexagon")
    with pytest.raises(InputError, match=r"among the model's 3: circle, square, triangle\. It also has hexagon"):
        load_dataset(str(two), "all", class_names=SHAPES, **words)
    assert classes_of(str(folder), 10) == (3, SHAPES)
    assert classes_of("synthetic", 10) == (10, ())


def test_a_data_set_is_known_again_when_it_grows_or_moves(folder: Path, tmp_path: Path) -> None:
    mine = draw_folder(tmp_path / "mine", 2)
    info = WeightsInfo(trained_on=data_tokens(str(mine)))
    assert info.was_trained_on(f"{mine}/")
    assert not info.was_trained_on(str(folder))
    (mine / "circle" / "more.png").write_bytes((mine / "circle" / "00.png").read_bytes())
    assert info.was_trained_on(str(mine))
    (mine / "circle" / "more.png").unlink()
    mine.rename(tmp_path / "moved")
    assert info.was_trained_on(str(tmp_path / "moved"))
    assert data_tokens("synthetic") == frozenset()
    assert not any(str(tmp_path) in token for token in info.trained_on)


def test_classes_of_fewer_than_ten_images_hold_none_out(folder: Path, tmp_path: Path) -> None:
    assert has_test_images(str(folder))
    assert has_test_images("cifar10")
    assert not has_test_images(str(draw_folder(tmp_path / "few", 9)))
    (tmp_path / "own" / "test").mkdir(parents=True)
    draw_folder(tmp_path / "own" / "train", 1)
    assert has_test_images(str(tmp_path / "own"))
    (tmp_path / "own" / "test").rmdir()
    assert not has_test_images(str(tmp_path / "own"))
