"""Pruning where the model lies on a GPU: the same masks as on a CPU, kept through a fine-tune."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.capture import capture_inference
from convoy.measurement import InProcessRunner, detect_target
from convoy.perfdb import Database
from convoy.prune import Recipe, accuracy, advise, prune_model
from convoy.settings import Settings
from convoy.training.trainer.finetune import FinetuneSchedule, finetune
from convoy.zoo import Preprocessing, load_dataset

pytestmark = pytest.mark.gpu


def small() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1, groups=2),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 4),
        ).eval()


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize(
    ("pattern", "sparsity"), [("unstructured", 0.7), ("2:4", None), ("block:2x4", 0.5), ("channel", 0.5)]
)
def test_masks_and_a_fine_tune(pattern: str, sparsity: float | None, scope: str) -> None:
    recipe, x = Recipe.of(pattern, sparsity, scope), torch.randn(2, 3, 8, 8)
    expected = prune_model(small(), recipe, (x,)).masks
    model = small().cuda()
    found = prune_model(model, recipe, (x.cuda(),)).masks
    assert found.keys() == expected.keys()
    assert all(torch.equal(mask.cpu(), expected[name]) for name, mask in found.items())
    images = load_dataset("synthetic:64", preprocessing=Preprocessing(8), classes=4)
    losses = finetune(model, found, images, FinetuneSchedule(epochs=4, batch=16, lr=0.05, augment=False))
    assert losses[-1] < losses[0]
    assert accuracy(model, images) > 0.25
    assert not any(model.get_parameter(name).detach()[~mask].any() for name, mask in found.items())


def test_advice_is_measured(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()).eval().cuda()
    captured = capture_inference(model, (torch.randn(1, 32, 16, 16, device="cuda"),))
    target, settings = detect_target("cuda"), Settings(db=tmp_path / "perf.db", numerics="strict")
    with Database.open(settings.db) as database, closing(InProcessRunner(target)) as runner:
        of = {"target": target, "settings": settings, "database": database, "runner": runner}
        found = advise("net", captured, **of, engine_ids=("aten", "pruned.cuda"), patterns=("unstructured",))  # type: ignore[arg-type]
    (layer,) = found.layers
    (pattern,) = layer.patterns
    assert layer.dense_us > 0
    assert [(point.engine, point.reason) for point in pattern.points] == [("pruned.cuda", "")] * 3
    assert all(point.us > 0 for point in pattern.points)
