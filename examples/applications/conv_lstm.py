"""Frames of a video one after the other: a ConvLSTM, whose loop over time is Python's."""

from __future__ import annotations

import sys

import torch
from side_by_side import compare
from torch import nn

import convoy


class ConvLSTM(nn.Module):
    """An LSTM whose products are convolutions; the last hidden state is turned into a prediction."""

    def __init__(self, inputs: int = 3, hidden: int = 32) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(inputs + hidden, 4 * hidden, 3, padding=1)
        self.head = nn.Conv2d(hidden, inputs, 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames [n, time, c, h, w] to the next frame [n, c, h, w]."""
        n, _, _, height, width = frames.shape
        hidden = cell = frames.new_zeros(n, self.hidden, height, width)
        for frame in frames.unbind(1):
            write, forget, read, new = self.gates(torch.cat([frame, hidden], dim=1)).chunk(4, dim=1)
            cell = forget.sigmoid() * cell + write.sigmoid() * new.tanh()
            hidden = read.sigmoid() * cell.tanh()
        return self.head(hidden)


def main(size: int = 64, time: int = 8, hidden: int = 32, settings: convoy.Settings | None = None) -> float:
    """Print the comparison for `time` frames of `size` x `size`; the largest difference."""
    torch.manual_seed(0)
    return compare("ConvLSTM", ConvLSTM(hidden=hidden).eval(), (torch.randn(1, time, 3, size, size),), settings)[1]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
