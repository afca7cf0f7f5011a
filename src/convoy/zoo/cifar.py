"""Small nets for CIFAR-10's 32x32 images, with the names that their published weights have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, hardtanh, max_pool2d, pad, relu

__all__ = ["CIFAR_NETS", "Ai85NasCifarNet", "CifarQuick", "CifarResNet"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters (He et al., CVPR 2016, option A)."""

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c, k, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(k)
        self.conv2 = nn.Conv2d(k, k, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(k)
        self.stride, self.grown = stride, k - c

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, c, h, w]; the shortcut takes every `stride`-th pixel and has zeros for channels that x lacks."""
        y = relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.grown:
            half = self.grown // 2
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.grown - half))
        return relu(x + y)


class CifarResNet(nn.Module):
    """ResNet-(6n + 2) of He et al., "Deep residual learning" (CVPR 2016), section 4.2: n blocks of 16, 32 and 64 channels."""

    def __init__(self, blocks: int, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, 1)
        self.layer2 = _stage(16, 32, blocks, 2)
        self.layer3 = _stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, 3, 32, 32]; gives [n, num_classes]."""
        x = relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(adaptive_avg_pool2d(x, 1).flatten(1))


def _stage(c: int, k: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(c, k, stride), *(BasicBlock(k, k, 1) for _ in range(blocks - 1)))


class Ai85NasCifarNet(nn.Module):
    """A plain chain of ten convolutions found by architecture search (Maxim Integrated), batch norms folded away.

    Each convolution is followed by a ReLU clipped at 127/128, the largest value of its 8-bit activations.
    """

    LARGEST: Final = 127 / 128

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1_1 = nn.Conv2d(3, 64, 3, padding=1)
        self.conv1_2 = nn.Conv2d(64, 32, 1)
        self.conv1_3 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv2_1 = nn.Conv2d(64, 32, 3, padding=1)
        self.conv2_2 = nn.Conv2d(32, 64, 1)
        self.conv3_1 = nn.Conv2d(64, 128, 3, padding=1)
        self.conv3_2 = nn.Conv2d(128, 128, 1)
        self.conv4_1 = nn.Conv2d(128, 64, 3, padding=1)
        self.conv4_2 = nn.Conv2d(64, 128, 3, padding=1)
        self.conv5_1 = nn.Conv2d(128, 128, 1)
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, 3, 32, 32]; gives [n, num_classes]."""
        stages = (
            (self.conv1_1, self.conv1_2, self.conv1_3),
            (self.conv2_1, self.conv2_2),
            (self.conv3_1, self.conv3_2),
            (self.conv4_1, self.conv4_2),
            (self.conv5_1,),
        )
        for index, convs in enumerate(stages):
            x = max_pool2d(x, 2) if index else x
            for conv in convs:
                x = hardtanh(conv(x), 0.0, self.LARGEST)
        return self.fc(x.flatten(1))


class CifarQuick(nn.Module):
    """Caffe's `cifar10_quick`: three 5x5 convolutions, two linear layers."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 32, 5, padding=2)
        self.conv3 = nn.Conv2d(32, 64, 5, padding=2)
        self.ip1 = nn.Linear(1024, 64)
        self.ip2 = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, 3, 32, 32]; gives [n, num_classes]."""
        x = relu(max_pool2d(self.conv1(x), 3, 2, ceil_mode=True))
        x = avg_pool2d(relu(self.conv2(x)), 3, 2, ceil_mode=True)
        x = avg_pool2d(relu(self.conv3(x)), 3, 2, ceil_mode=True)
        return self.ip2(self.ip1(x.flatten(1)))


CIFAR_NETS: Final[dict[str, Callable[..., nn.Module]]] = {
    "resnet20_cifar10": partial(CifarResNet, 3),
    "resnet56_cifar10": partial(CifarResNet, 9),
    "ai85nascifarnet_cifar10": Ai85NasCifarNet,
    "cifar10_quick": CifarQuick,
}
"""Builders by name; each takes `num_classes`."""
