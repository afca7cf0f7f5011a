"""The nets for CIFAR-10: names of their parameters, shapes, and, with published weights at hand, their accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convoy.errors import InputError
from convoy.zoo import example_args, input_size, load_dataset, load_model, model_names, preprocessing
from convoy.zoo.cifar import CIFAR_NETS

DATA = Path(__file__).parents[4] / "shared" / "data"

PARAMETERS = {
    "resnet20_cifar10": 269_722,
    "resnet56_cifar10": 853_018,
    "ai85nascifarnet_cifar10": 302_602,
    "cifar10_quick": 145_578,
}
"""Numbers of parameters: of the ResNets as He et al. give them (0.27 and 0.85 million), of the others as published files have."""


@pytest.mark.parametrize("name", CIFAR_NETS)
def test_a_net_by_its_name(name: str) -> None:
    model = load_model(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert input_size(name) == preprocessing(name).size == 32
    assert name in model_names()
    x = example_args(model, default_size=input_size(name))
    with torch.no_grad():
        y = model(*x)
    assert y.shape == (1, 10)
    assert 1e-3 < float(y.std()) < 1e3
    with torch.no_grad():
        assert load_model(name, num_classes=3)(*x).shape == (1, 3)


def test_there_is_nothing_to_download() -> None:
    with pytest.raises(InputError, match="resnet20_cifar10 has no download"):
        load_model("resnet20_cifar10", weights="DEFAULT")


def test_the_shortcut_takes_every_other_pixel_and_lacks_channels_at_both_sides() -> None:
    block = load_model("resnet20_cifar10").layer2[0]  # type: ignore[index,union-attr]
    with torch.no_grad():
        block.bn2.weight.zero_()
        block.bn2.bias.zero_()
        x = torch.rand(1, 16, 6, 6)
        y = block(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


RIGHT = {"resnet20_cifar10": 0.8135, "ai85nascifarnet_cifar10": 0.8130, "cifar10_quick": 0.7342}
"""Share of the first 2,000 test images that other programs found the published weights to get right, cifar10_quick's of all
10,000; in 300 of them, three standard deviations are 0.07."""


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the published weights and images")
@pytest.mark.parametrize("name", RIGHT)
def test_published_weights_get_published_accuracy(name: str) -> None:
    model = load_model(name, weights=DATA / f"{name}.safetensors")
    images = load_dataset(f"cifar10:{DATA}", "test", preprocessing=preprocessing(name), classes=10, limit=300)
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in images.batches(100))
    assert abs(right / 300 - RIGHT[name]) < 0.07


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the published weights")
def test_resnet56s_published_weights_fit() -> None:
    model = load_model("resnet56_cifar10", weights=DATA / "resnet56_cifar10.safetensors")
    assert float(model.get_parameter("layer3.8.conv2.weight").detach().std()) > 0
