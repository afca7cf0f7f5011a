"""Pruning a model in place, through a fine-tune, to a file: zeros where they were asked for, and there to stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.utils import prune as torch_prune

from convoy.errors import ConvoyError, InputError
from convoy.prune import (
    Recipe,
    accuracy,
    check_weights_path,
    describe_weights,
    prune_model,
    save_weights,
)
from convoy.prune.accuracy import class_scores
from convoy.training.trainer.finetune import FinetuneSchedule, finetune
from convoy.zoo import Dataset, Preprocessing, load_dataset, load_model, preprocessing
from convoy.zoo.weights import load_into, read

DATA = Path(__file__).parents[4] / "shared" / "data"
SIZE = 8


class Small(nn.Module):
    """Convolutions with and without batch norm and bias, one of them grouped, dropout, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 16, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def small() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Small().eval()


def synthetic(split: str = "train", count: int = 128) -> Dataset:
    return load_dataset(f"synthetic:{count}", split, preprocessing=Preprocessing(SIZE), classes=4)


X = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))

PATTERNS = [("unstructured", 0.7), ("2:4", None), ("block:2x4", 0.5), ("channel", 0.5)]


@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS)
def test_rows_tell_what_the_model_has_now(pattern: str, sparsity: float | None) -> None:
    model, before = small(), small().state_dict()
    done = prune_model(model, Recipe.of(pattern, sparsity), (X,))
    for row in done.layers:
        weight = model.get_parameter(f"{row.name}.weight").detach()
        assert (row.shape, row.zeros_after) == (tuple(weight.shape), int((weight == 0).sum()))
        assert row.zeros_before == int((before[f"{row.name}.weight"] == 0).sum())
        assert row.kept_norm == pytest.approx(float(weight.norm() / before[f"{row.name}.weight"].norm()), rel=1e-5)
        assert row.zeros_after > row.zeros_before or row.reason
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        changed = tensor != before[name]
        assert bool((tensor[changed] == 0).all())
        assert not torch.signbit(tensor[tensor == 0]).any()
        if name in done.masks:
            assert torch.equal(tensor, torch.where(done.masks[name], before[name], torch.zeros(())))
        else:
            assert torch.equal(tensor, before[name])
    assert not model.training
    assert model(X).shape == (2, 4)


@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS)
def test_a_fine_tune_learns_and_keeps_the_zeros(pattern: str, sparsity: float | None) -> None:
    model = small()
    done = prune_model(model, Recipe.of(pattern, sparsity), (X,))
    pruned = accuracy(model, synthetic("test"))
    started = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = finetune(model, done.masks, synthetic(), FinetuneSchedule(epochs=4, batch=16, lr=0.05, augment=False))
    for name, mask in done.masks.items():
        gone = model.get_parameter(name).detach()[~mask]
        assert not gone.any()
        assert not torch.signbit(gone).any()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, started[name])
        assert parameter.grad is None
    assert losses[-1] < losses[0]
    assert accuracy(model, synthetic("test")) > pruned
    assert not model.training
    assert [n for n, _ in model.named_buffers() if n.endswith("_mask")] == []


def test_a_loop_without_masks_would_be_seen() -> None:
    model = small()
    done = prune_model(model, Recipe.of("unstructured", 0.7))
    finetune(model, {}, synthetic(), FinetuneSchedule(epochs=1, batch=16, lr=0.05))
    assert all(bool(model.get_parameter(name).detach()[~mask].any()) for name, mask in done.masks.items())


def test_the_same_seed_gives_the_same_weights() -> None:
    def run(seed: int) -> dict[str, torch.Tensor]:
        model = small()
        done = prune_model(model, Recipe.of("unstructured", 0.5))
        torch.manual_seed(torch.seed() % 1000)  # what others draw must not matter
        finetune(model, done.masks, synthetic(count=32), FinetuneSchedule(batch=8, seed=seed))
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    one, same, other = run(1), run(1), run(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["body.0.weight"], other["body.0.weight"])


def test_a_fine_tune_leaves_the_callers_random_numbers_alone() -> None:
    model = small()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    finetune(model, {}, synthetic(count=16), FinetuneSchedule(batch=8))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_is_no_number_is_an_error() -> None:
    model = small()
    with pytest.raises(ConvoyError, match="a lower lr than 1e"):
        finetune(model, {}, synthetic(), FinetuneSchedule(epochs=3, batch=8, lr=1e30))
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("words", [{"epochs": 0}, {"batch": 1}, {"lr": 0.0}, {"lr": float("nan")}, {"lr": -1.0}])
def test_a_schedule_is_checked(words: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(words))):
        FinetuneSchedule(**words)  # type: ignore[arg-type]


def test_one_image_is_too_few() -> None:
    with pytest.raises(InputError, match="at least 2 to train on"):
        finetune(small(), {}, synthetic(count=1), FinetuneSchedule())


def test_outputs_that_are_no_classes_are_refused() -> None:
    assert class_scores((torch.zeros(2, 3), None)).shape == (2, 3)
    for outputs in (torch.zeros(2, 3, 4, 4), "words", ()):
        with pytest.raises(InputError, match="as a classifier has them"):
            class_scores(outputs)


def test_masks_of_torch_become_zeros_and_count() -> None:
    model = small()
    torch_prune.random_unstructured(model.body[0], "weight", 0.4)  # type: ignore[index,union-attr]
    was = model.body[0].weight_mask == 0  # type: ignore[index,union-attr]
    done = prune_model(model, Recipe.of("unstructured", 0.5))
    assert model.state_dict().keys() == small().state_dict().keys()
    assert bool((model.get_parameter("body.0.weight")[was] == 0).all())
    assert done.notes == ("body.0.weight had a mask of torch.nn.utils.prune, which became zeros",)
    assert done.layers[0].zeros_before == int(was.sum())
    assert done.layers[0].zeros_after == 108


def test_a_shared_weight_stays_shared_and_is_masked_everywhere() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    done = prune_model(model, Recipe.of("unstructured", 0.5))
    assert model[2].weight is model[0].weight
    assert {"0.weight", "2.weight"} <= done.masks.keys()
    assert int((model[0].weight == 0).sum()) == 18


def test_channels_want_inputs_and_finite_weights_are_wanted() -> None:
    with pytest.raises(InputError, match="example inputs with pattern channel"):
        prune_model(small(), Recipe.of("channel", 0.5))
    model = small()
    with torch.no_grad():
        model.get_parameter("head.2.weight")[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"'head\.2'"):
        prune_model(model, Recipe.of("unstructured", 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_a_plain_state_dict(tmp_path: Path, dtype: torch.dtype) -> None:
    model = small().to(dtype)
    prune_model(model, Recipe.of("2:4"))
    path = tmp_path / "pruned.safetensors"
    path.write_bytes(b"older")
    save_weights(model, path, {"pattern": "2:4"})
    other = small().to(dtype)
    load_into(other, read(path), path)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"pattern": "2:4"}
    assert [p.name for p in tmp_path.iterdir()] == ["pruned.safetensors"]


def test_a_file_says_how_it_was_pruned(tmp_path: Path) -> None:
    path, model = tmp_path / "w.safetensors", nn.Linear(2, 2)
    about = {"pattern": "2:4", "sparsity": "0.5", "scope": "layer", "model": "m"}
    save_weights(model, path, about)
    assert describe_weights(str(path)) == "the weights were pruned: pattern 2:4, sparsity 0.5, scope layer"
    save_weights(model, path, about | {"accuracy": "0.75", "accuracy_before": "0.8", "accuracy_images": "9 of photos"})
    assert describe_weights(str(path)).endswith("scope layer; accuracy on 9 of photos: 0.8 before, 0.75 after")
    save_weights(model, path, about | {"pattern": "x" * 10_000})
    assert len(describe_weights(str(path))) == 400
    save_weights(model, path, {"made_by": "somebody"})
    assert not describe_weights(str(path))
    path.write_bytes(b"no tensors")
    assert not any(map(describe_weights, (str(path), str(tmp_path / "none"), "DEFAULT", None)))


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ends in \.safetensors"):
        check_weights_path(tmp_path / "pruned.pth")
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(InputError, match="out: got"):
        save_weights(small(), tmp_path / "a.safetensors", {})
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the published weights and images")
def test_a_published_net_halved_and_mended() -> None:
    """ResNet-20 at half of its weights: 78 % on 500 images, and 83 % after 1,280 training images."""
    name = "resnet20_cifar10"
    model = load_model(name, weights=DATA / f"{name}.safetensors")
    wanted = {"preprocessing": preprocessing(name), "classes": 10}
    test = load_dataset(f"cifar10:{DATA}", "test", limit=200, **wanted)  # type: ignore[arg-type]
    train = load_dataset(f"cifar10:{DATA}", "train", limit=384, **wanted)  # type: ignore[arg-type]
    done = prune_model(model, Recipe.of("unstructured", 0.5))
    pruned = accuracy(model, test)
    assert 0.68 < pruned < 0.86
    finetune(model, done.masks, train, FinetuneSchedule(batch=64))
    assert accuracy(model, test) > pruned - 0.02
    assert sum(row.zeros_after for row in done.layers) == sum(
        int((model.get_parameter(f"{row.name}.weight") == 0).sum()) for row in done.layers
    )
