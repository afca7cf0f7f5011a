"""Objects in photographs of any size: torchvision's RetinaNet, with its pre- and post-processing as they are.

A detector cannot be captured whole: how many boxes it keeps depends on the image. Convoy makes programs of its backbone and its
heads, PyTorch runs the rest, and one warning says which is which.
"""

from __future__ import annotations

import sys

import torch
from side_by_side import compare, randomized
from torch import nn

import convoy
from convoy.zoo import import_torchvision


def retinanet() -> nn.Module:
    """RetinaNet with a ResNet-50, randomly initialised: give `weights="DEFAULT"` for the trained one."""
    models = import_torchvision().models
    return models.detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None)


def main(
    height: int = 480, width: int = 640, settings: convoy.Settings | None = None, model: nn.Module | None = None
) -> float:
    """Print the comparison for one image; the largest difference of the boxes and scores."""
    torch.manual_seed(0)
    images = [torch.rand(3, height, width)]
    fast, difference = compare("detector", randomized(model or retinanet()), (images,), settings)
    for part in getattr(fast, "parts", ()):
        print(f"  {part.path}: {part.share:.0%} of PyTorch's time")
    return difference


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
