"""Images from noise: the generator of a DCGAN, transposed convolutions with batch norms."""

from __future__ import annotations

import sys

import torch
from side_by_side import compare, randomized
from torch import nn

import convoy


class Generator(nn.Sequential):
    """[n, noise, 1, 1] to images [n, 3, 4 * 2^k, 4 * 2^k] in -1..1, where k is the number of widths."""

    def __init__(self, noise: int = 100, widths: tuple[int, ...] = (512, 256, 128, 64)) -> None:
        layers: list[nn.Module] = []
        inputs, stride, padding = noise, 1, 0
        for width in widths:
            layers += [
                nn.ConvTranspose2d(inputs, width, 4, stride, padding, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            inputs, stride, padding = width, 2, 1
        super().__init__(*layers, nn.ConvTranspose2d(inputs, 3, 4, 2, 1, bias=False), nn.Tanh())


def main(
    batch: int = 16, widths: tuple[int, ...] = (512, 256, 128, 64), settings: convoy.Settings | None = None
) -> float:
    """Print the comparison for a batch of images; the largest difference."""
    model = randomized(Generator(widths=widths))
    return compare("DCGAN generator", model, (torch.randn(batch, 100, 1, 1),), settings)[1]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
