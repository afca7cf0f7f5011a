"""A stage of a diffusion U-Net: residual blocks with group norm and the time step, then self-attention over the pixels."""

from __future__ import annotations

import sys

import torch
from side_by_side import compare
from torch import nn
from torch.nn import functional

import convoy


class Residual(nn.Module):
    """Group norm, SiLU and 3x3 convolution, twice; the time embedding is added in between."""

    def __init__(self, channels: int, times: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(times, channels)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """[n, c, h, w] and [n, times] to [n, c, h, w]."""
        y = self.conv1(functional.silu(self.norm1(x))) + self.time(functional.silu(time))[:, :, None, None]
        return x + self.conv2(functional.silu(self.norm2(y)))


class Attention(nn.Module):
    """Self-attention of the pixels, through `scaled_dot_product_attention`."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, c, h, w] to the same shape."""
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        y = functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(n, c, h, w))


class Stage(nn.Module):
    """Two residual blocks, each with attention behind it."""

    def __init__(self, channels: int = 128, times: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(channels, times) for _ in range(2))
        self.attention = nn.ModuleList(Attention(channels, heads) for _ in range(2))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """[n, c, h, w] and [n, times] to [n, c, h, w]."""
        for block, attention in zip(self.blocks, self.attention, strict=True):
            x = attention(block(x, time))
        return x


def main(size: int = 32, channels: int = 128, settings: convoy.Settings | None = None) -> float:
    """Print the comparison for two latents of `size` x `size`; the largest difference."""
    torch.manual_seed(0)
    args = (torch.randn(2, channels, size, size), torch.randn(2, 256))
    return compare("diffusion U-Net stage", Stage(channels).eval(), args, settings)[1]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
