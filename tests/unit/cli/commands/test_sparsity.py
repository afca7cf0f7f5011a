"""convoy sparsity: counts on real files, and says what makes its figures less than the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from convoy.cli.app import app

FACTORY = """
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))


def ready():
    model = net()
    model(torch.zeros(1, 3, 12, 12))
    return model
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparsity")
    (folder / "net.py").write_text(FACTORY)
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 12, 12), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images)
    return folder


def run(files: Path, *words: str) -> str:
    done = CliRunner().invoke(app, ["sparsity", f"{files / 'net.py'}:ready", "--trust", "--size", "12", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_zeros_on_images_are_counted_image_by_image(files: Path) -> None:
    report, path = files / "zeros.html", files / "zeros.json"
    said = run(
        files, "--input", str(files / "images.npz"), "--images", "4", "--report", str(report), "--json", str(path)
    )
    found = json.loads(path.read_text())
    assert found["images"] == 4
    first, second = found["layers"]
    assert first["zeros"] < 0.1
    assert first["x"] == [3, 12, 12]
    assert 0.1 < second["p10"] <= second["zeros"] <= second["p90"] < 0.9
    assert f"{100 * second['zeros']:.1f}" in said
    assert "no weights were given" in said
    assert "no images" not in said
    assert "<svg" in report.read_text()


def test_without_images_it_says_so(files: Path) -> None:
    assert "no images were given" in run(files)


def test_a_number_of_images_that_makes_no_sense_is_refused(files: Path) -> None:
    done = CliRunner().invoke(app, ["sparsity", f"{files / 'net.py'}:ready", "--trust", "--images", "0"])
    assert "--images" in str(done.exception)
