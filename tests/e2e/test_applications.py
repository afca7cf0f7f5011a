"""examples/applications, at small size: whole nets and detectors of many kinds, each right against PyTorch."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy.zoo import import_torchvision
from tests.unit.pipeline.untimed import plans_kept

FOLDER = Path(__file__).parents[2] / "examples" / "applications"
HELPERS = ("side_by_side",)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("db") / "perf.db")


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Examples import each other as scripts do, and every right plan is kept: nothing here depends on the clock."""
    sys.path.insert(0, str(FOLDER))
    with plans_kept():
        yield
    sys.path.remove(str(FOLDER))


def tiny_backbone() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
    body.out_channels = 16
    return body


def anchors() -> Any:
    return import_torchvision().models.detection.anchor_utils.AnchorGenerator(((8, 16),), ((0.5, 1.0),))


def small_retinanet() -> nn.Module:
    torch.manual_seed(0)  # of scores that are equal but for rounding, rounding decides what box suppresses which
    detection = import_torchvision().models.detection
    head = detection.retinanet.RetinaNetHead(16, 4, 3, nn.BatchNorm2d)
    return detection.RetinaNet(
        tiny_backbone(), 3, min_size=32, max_size=48, anchor_generator=anchors(), head=head, score_thresh=0.0
    )


def small_faster_rcnn() -> nn.Module:
    torch.manual_seed(1)  # with it, how many regions the last heads are given depends on the image
    detection = import_torchvision().models.detection
    pool = importlib.import_module("torchvision.ops").MultiScaleRoIAlign(["0"], 2, 1)
    return detection.FasterRCNN(
        tiny_backbone(), 3, min_size=32, max_size=48, rpn_anchor_generator=anchors(), box_roi_pool=pool,
        rpn_nms_thresh=0.3, box_score_thresh=0.0,
    )  # fmt: skip


def small_lraspp() -> nn.Module:
    models = import_torchvision().models
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish(), nn.Conv2d(8, 16, 3, 2, 1))
    backbone = models._utils.IntermediateLayerGetter(body, {"2": "low", "3": "high"})
    return models.segmentation.LRASPP(backbone, 8, 16, 3, 8)


def small_clip_net() -> nn.Module:
    video = import_torchvision().models.video
    makers = [video.resnet.Conv3DSimple] * 4
    return video.VideoResNet(video.resnet.BasicBlock, makers, [1, 1, 1, 1], video.resnet.BasicStem)


CASES: dict[str, list[Callable[[ModuleType, convoy.Settings], Any]]] = {
    "audio": [lambda m, s: m.main(8000, 4, s)],
    "conv_lstm": [lambda m, s: m.main(8, 2, 4, s)],
    "detection": [
        lambda m, s: m.main(32, 40, s, small_retinanet()),
        lambda m, s: m.main(32, 40, s, small_faster_rcnn()),
    ],
    "diffusion_block": [lambda m, s: m.main(4, 16, s)],
    "gan_generator": [lambda m, s: m.main(1, (8, 8), s)],
    "segmentation": [lambda m, s: m.main(32, s, small_lraspp())],
    "unet": [lambda m, s: m.main(16, (4, 8), s)],
    "unet_3d": [lambda m, s: m.main(8, (4, 8), s)],
    "video": [lambda m, s: m.clip(16, 2, s, small_clip_net())],
}
"""How each example runs in a test; one without an entry fails `test_every_example_has_a_case`."""


PARTS = ["backbone", "head", "backbone", "rpn.head"]
"""What programs compute of the two detectors. The boxes of Faster R-CNN's last heads are as many as the image has."""


def test_every_example_has_a_case() -> None:
    assert sorted([*CASES, *HELPERS]) == sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", CASES)
def test_an_application_is_right(
    name: str, settings: convoy.Settings, operators: None, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which parts of a detector run: tests/unit/pipeline/test_parts.py
        for run in CASES[name]:
            assert run(module, settings) < 1e-4
    said = capsys.readouterr().out
    assert said.count("largest difference") >= len(CASES[name])
    if name == "detection":
        assert [line.split(":")[0].strip() for line in said.splitlines() if line.startswith("  ")] == PARTS


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of torchvision's operators, which a CUDA build of it does not load beside a CPU build of torch."""
    import_torchvision()
    if not importlib.import_module("torchvision.extension")._has_ops():
        monkeypatch.setattr(importlib.import_module("torchvision.ops.boxes"), "nms", nms)
        monkeypatch.setattr(importlib.import_module("torchvision.ops.poolers"), "roi_align", roi_means)


def roi_means(features: torch.Tensor, boxes: torch.Tensor, output_size: tuple[int, int], **_: object) -> torch.Tensor:
    """Stands for `torchvision.ops.roi_align` of boxes [n, 5], an image's index first: its mean, weighed by the box."""
    means = features.mean((2, 3))[boxes[:, 0].long()] * boxes[:, 1:].mean(1, keepdim=True) / 32
    return means[:, :, None, None].expand(-1, -1, *output_size).contiguous()


def nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Indices of the boxes that overlap no better one by more than the threshold, best first; `torchvision.ops.nms`."""
    overlaps = (importlib.import_module("torchvision.ops").box_iou(boxes, boxes) > iou_threshold).tolist()
    kept: list[int] = []
    for index in scores.argsort(descending=True, stable=True).tolist():
        if not any(overlaps[index][other] for other in kept):
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64)
