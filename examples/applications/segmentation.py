"""Segmentation by a net of torchvision, whose output is a dict."""

from __future__ import annotations

import sys

import torch
from side_by_side import compare, randomized
from torch import nn

import convoy
from convoy.zoo import import_torchvision


def lraspp() -> nn.Module:
    """LR-ASPP over MobileNetV3, randomly initialised; DeepLabV3 and FCN run the same way."""
    models = import_torchvision().models
    return models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=21)


def main(size: int = 256, settings: convoy.Settings | None = None, model: nn.Module | None = None) -> float:
    """Print the comparison of a net of `torchvision.models.segmentation` for one image; the largest difference."""
    torch.manual_seed(0)
    model = randomized(model or lraspp())
    return compare(type(model).__name__, model, (torch.rand(1, 3, size, size),), settings)[1]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
