"""Commands with a .pt2: each takes the file's own batch, size and dtype, or says which argument does not fit it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from convoy.cli.app import app
from convoy.errors import InputError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of one net: `fixed.pt2` takes [2, 3, 8, 8] alone, `batches.pt2` any batch, `half.pt2` is in fp16; and images."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    x, batch = torch.randn(2, 3, 8, 8), torch.export.Dim("batch", max=64)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "fixed.pt2")
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=({0: batch},)), tmp_path / "batches.pt2")
    torch.export.save(torch.export.export(model.half(), (x.half(),)), tmp_path / "half.pt2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "perf.db"))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("optimize", "fixed.pt2", "--batch", "3"), "--batch: got 3, expected 2"),
        (("optimize", "fixed.pt2", "--size", "16"), "--size: got '16x16', expected 8x8"),
        (("optimize", "batches.pt2", "--batch", "3", "--size", "16"), "--size: got '16x16', expected 8x8"),
        (("export", "fixed.pt2", "--batch", "3", "-o", "net.convoy"), "--batch: got 3, expected 2"),
        (("layers", "fixed.pt2", "--batch", "3"), "--batch: got 3, expected 2"),
        (("compare", "fixed.pt2", "--batch", "2,3"), "--batch: got 3, expected 2"),
        (("compare", "half.pt2", "--dtype", "fp16"), "MODEL: got 'half.pt2', expected a model with fp32 parameters"),
        (("scale", "fixed.pt2", "--gpus", "1", "--batch", "4"), "--batch: got 4, expected 2"),
        (("scale", "half.pt2", "--gpus", "1"), "MODEL: got 'half.pt2', expected a model with fp32 parameters"),
        (("study", "--strategies", "half.pt2"), "--dtype: got 'fp32', expected fp16"),
        (("study", "--strategies", "fixed.pt2", "--batch", "3"), "--batch: got 3, expected 2"),
        (("train", "fixed.pt2"), "MODEL: got 'fixed.pt2', expected a model that takes any batch"),
        (("train", "half.pt2"), "MODEL: got 'half.pt2', expected a model with fp32 parameters"),
        (("train", "batches.pt2", "--size", "16"), "--size: got '16x16', expected 8x8"),
        (
            ("prune", "fixed.pt2", "--sparsity", "0.5"),
            "MODEL: got 'fixed.pt2', expected a model with Conv2d or Linear modules",
        ),
    ],
)
def test_the_argument_that_does_not_fit_is_named(folder: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError) as error:
        CliRunner().invoke(
            app, [*words, *(() if words[0] == "layers" else ("--device", "cpu"))], catch_exceptions=False
        )
    assert str(error.value).startswith(said)
    assert not list(folder.glob("*-pt2.json"))  # no run file of a run that could not begin


def test_a_comparison_takes_the_programs_own_batch_and_size(folder: Path) -> None:
    words = ["compare", "fixed.pt2", "--frameworks", "torch", "--device", "cpu", "--rounds", "3", "--out", "run.json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    rows = json.loads((folder / "run.json").read_text())["rows"]
    assert [(row["provider"], row["batch"], row["status"]) for row in rows] == [("torch", 2, "ok")]


def test_a_scaling_run_takes_the_programs_own_batch(folder: Path) -> None:
    words = ["scale", "fixed.pt2", "--providers", "torch.ddp", "--device", "cpu", "--gpus", "1", "--round-s", "0.01"]
    result = CliRunner().invoke(app, [*words, "--out", "run.json"])
    assert result.exit_code == 0, result.output
    rows = json.loads((folder / "run.json").read_text())["rows"]
    assert [(row["provider"], row["batch"], row["status"]) for row in rows] == [("torch.ddp", 2, "ok")]


def test_a_program_with_any_batch_is_trained_on_images_of_its_own_size(folder: Path) -> None:
    words = ["train", "batches.pt2", "--images", "40", "--batch", "16", "--stock", "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "epoch 1 of 1: loss" in result.output
