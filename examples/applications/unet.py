"""Segmentation with a U-Net as in segmentation_models_pytorch: an encoder of residual blocks, a decoder that upsamples."""

from __future__ import annotations

import itertools
import sys

import torch
from side_by_side import compare, randomized
from torch import nn
from torch.nn import functional

import convoy


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """3x3 convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Residual(nn.Module):
    """The basic block of ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = block(inputs, outputs, stride)
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        return functional.relu(self.second(self.first(x)) + self.shortcut(x))


class UNet(nn.Module):
    """Scores of each pixel, of the image's size."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), classes: int = 5) -> None:
        super().__init__()
        self.stem = block(3, widths[0])
        self.encoder = nn.ModuleList(Residual(a, b, 2) for a, b in itertools.pairwise(widths))
        self.decoder = nn.ModuleList(
            nn.Sequential(block(a + b, b), block(b, b)) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(widths[0], classes, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 3, h, w] to [n, classes, h, w]; h and w are multiples of the encoder's stride."""
        skips = [self.stem(x)]
        for stage in self.encoder:
            skips.append(stage(skips[-1]))
        x = skips.pop()
        for stage in self.decoder:
            x = stage(torch.cat([functional.interpolate(x, scale_factor=2.0, mode="nearest"), skips.pop()], dim=1))
        return self.head(x)


def main(
    size: int = 256, widths: tuple[int, ...] = (32, 64, 128, 256), settings: convoy.Settings | None = None
) -> float:
    """Print the comparison for one image of `size` x `size` pixels; the largest difference."""
    return compare("U-Net", randomized(UNet(widths)), (torch.randn(1, 3, size, size),), settings)[1]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
