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

Boxes = list[dict[str, torch.Tensor]]
"""Of each image: `boxes` [n, 4], `scores` [n] and `labels` [n]."""

SAME = 0.01
"""Boxes that differ by more, in pixels or score, are not the same."""


def retinanet() -> nn.Module:
    """RetinaNet with a ResNet-50, randomly initialised: give `weights="DEFAULT"` for the trained one."""
    models = import_torchvision().models
    return models.detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None)


def with_apart_scores(model: nn.Module) -> nn.Module:
    """A RetinaNet with a classifier whose scores differ, as a trained one's do; other detectors as they are.

    An untrained classifier gives all boxes the same score but for rounding, which then decides what box suppresses which.
    """
    for name, module in model.named_modules():
        if name.endswith("classification_head.cls_logits"):
            nn.init.normal_(module.weight, std=0.5)
    return model


def paired_boxes(found: Boxes, wanted: Boxes) -> tuple[Boxes, Boxes]:
    """The boxes of both in one order: boxes with nearly equal scores come in the order that rounding gives them.

    Raises:
        ValueError: a box is in one of them alone.
    """
    pairs = [_paired(one, other) for one, other in zip(found, wanted, strict=True)]
    return [one for one, _ in pairs], [other for _, other in pairs]


def _paired(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], ...]:
    """Each box beside the one that it is nearest to, where that is nearest to it as well, and the same."""
    apart = torch.cdist(_features(found), _features(wanted), p=torch.inf)
    if not apart.numel():
        rows = columns = torch.zeros(0, dtype=torch.long)
    else:
        nearest, back = apart.argmin(1), apart.argmin(0)
        both = back[nearest] == torch.arange(len(nearest), device=nearest.device)
        rows = torch.nonzero(both & (apart.amin(1) <= SAME)).flatten()
        columns = nearest[rows]
    if len(rows) < max(apart.shape):
        raise ValueError(f"of {apart.shape[0]} and {apart.shape[1]} boxes only {len(rows)} are the same")
    return (
        {name: values[rows] for name, values in found.items()},
        {name: values[columns] for name, values in wanted.items()},
    )


def _features(image: dict[str, torch.Tensor]) -> torch.Tensor:
    """[n, 6]: corners in pixels, score, and the label so far apart that no box is near one of another label."""
    columns = (image["boxes"], image["scores"][:, None], 1e6 * image["labels"][:, None])
    return torch.cat([column.double() for column in columns], 1)


def main(
    height: int = 480, width: int = 640, settings: convoy.Settings | None = None, model: nn.Module | None = None
) -> float:
    """Print the comparison for one image; the largest difference of the boxes and scores that both found."""
    torch.manual_seed(0)
    images = [torch.rand(3, height, width)]
    detector = with_apart_scores(randomized(model or retinanet()))
    fast, difference = compare("detector", detector, (images,), settings, paired_boxes)
    for part in getattr(fast, "parts", ()):
        print(f"  {part.path}: {part.share:.0%} of PyTorch's time")
    return difference


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
