"""A volume segmented by a 3-D U-Net as MONAI and nnU-Net build it, and a training step of it with a Dice loss."""

from __future__ import annotations

import copy
import itertools
import sys

import torch
from side_by_side import compare, largest_difference
from torch import nn

import convoy


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """3x3x3 convolution, instance norm, leaky ReLU."""
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, stride, 1), nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01)
    )


class UNet3d(nn.Module):
    """Scores of each voxel, of the volume's size."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), classes: int = 2) -> None:
        super().__init__()
        self.stem = block(1, widths[0])
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(nn.Sequential(block(a, b, 2), block(b, b)) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(block(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 1, d, h, w] to [n, classes, d, h, w]; sides are multiples of the encoder's stride."""
        skips = [self.stem(x)]
        for stage in self.down:
            skips.append(stage(skips[-1]))
        x = skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], dim=1))
        return self.head(x)


def dice_loss(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """1 - Dice coefficient of [n, classes, d, h, w] scores and {0, 1} targets of the same shape, smoothed."""
    chance = scores.softmax(1)
    shared = (chance * wanted).sum((2, 3, 4))
    return 1 - ((2 * shared + 1) / (chance.sum((2, 3, 4)) + wanted.sum((2, 3, 4)) + 1)).mean()


def main(side: int = 64, widths: tuple[int, ...] = (16, 32, 64, 128), settings: convoy.Settings | None = None) -> float:
    """Print the comparison for one volume of `side`^3 voxels, and of a training step; the largest difference of both."""
    torch.manual_seed(0)
    model = UNet3d(widths).eval()
    volume = torch.randn(1, 1, side, side, side)
    _, difference = compare("3-D U-Net", model, (volume,), settings)
    wanted = (torch.rand(1, 2, side, side, side) > 0.5).float()
    return max(difference, train(model, volume, wanted, settings))


def train(model: nn.Module, volume: torch.Tensor, wanted: torch.Tensor, settings: convoy.Settings | None) -> float:
    """Make two training steps by Convoy and by PyTorch, from the same weights; the largest difference of the losses."""
    twin = copy.deepcopy(model)
    losses: list[list[torch.Tensor]] = []
    step = convoy.training_step(
        model.train(), dice_loss, torch.optim.SGD(model.parameters(), 0.1), (volume, wanted), settings=settings
    )
    losses.append([step(volume, wanted).detach() for _ in range(2)])
    optimizer = torch.optim.SGD(twin.train().parameters(), 0.1)
    losses.append([])
    for _ in range(2):
        optimizer.zero_grad()
        loss = dice_loss(twin(volume), wanted)
        loss.backward()
        optimizer.step()
        losses[1].append(loss.detach())
    difference = largest_difference(*losses)
    print(f"3-D U-Net, two training steps: largest difference of the loss {difference:.1e}")
    return difference


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
