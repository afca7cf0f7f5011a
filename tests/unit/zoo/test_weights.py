"""Weights from .safetensors: exactly the model's names, shapes and kinds, or one line that says what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from convoy.errors import InputError
from convoy.zoo import load_model
from convoy.zoo import weights as checkpoints


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn_like(t) if t.is_floating_point() else t for name, t in Net().state_dict().items()}


def load(state: dict[str, torch.Tensor], path: Path) -> Net:
    model = Net()
    save_file(state, path)
    checkpoints.load_into(model, checkpoints.read(path), path)
    return model


def test_all_tensors_arrive(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = load(state, tmp_path / "w.safetensors")
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_batch_norms_counters_may_be_missing(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    del state["norm.num_batches_tracked"]
    assert torch.equal(load(state, tmp_path / "w.safetensors").conv.weight, state["conv.weight"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"conv.bias": None}, "1 missing: conv.bias."),
        ({"more": torch.zeros(2)}, "1 unexpected: more."),
        (
            {"conv.weight": torch.zeros(4, 3, 5, 5)},
            "1 differ: conv.weight is [4, 3, 5, 5] and should be [4, 3, 3, 3].",
        ),
        ({"conv.bias": torch.zeros(4, dtype=torch.int32)}, "conv.bias in torch.float32"),
        ({f"x{i}": torch.zeros(1) for i in range(5)}, "5 unexpected: x0, x1, x2, ..."),
    ],
)
def test_what_differs_is_named(
    state: dict[str, torch.Tensor], tmp_path: Path, change: dict[str, torch.Tensor | None], expected: str
) -> None:
    changed = {name: t for name, t in {**state, **change}.items() if t is not None}
    with pytest.raises(InputError) as caught:
        load(changed, tmp_path / "w.safetensors")
    assert expected in str(caught.value)
    assert "w.safetensors" in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    for name, expected in (("noise.safetensors", "whole"), ("absent.safetensors", "there"), ("w.pth", "Pickled")):
        with pytest.raises(InputError, match=expected):
            checkpoints.read(tmp_path / name)


def test_a_fine_tuned_file_gives_the_number_of_classes(tmp_path: Path) -> None:
    tuned = load_model("squeezenet1_1", num_classes=5)
    save_file({n: t.contiguous() for n, t in tuned.state_dict().items()}, tmp_path / "tuned.safetensors")
    model = load_model("squeezenet1_1", weights=tmp_path / "tuned.safetensors")
    assert all(torch.equal(t, tuned.state_dict()[n]) for n, t in model.state_dict().items())
    with pytest.raises(InputError, match="2 differ"):
        load_model("squeezenet1_1", weights=tmp_path / "tuned.safetensors", num_classes=1000)
