"""A spoken word from its waveform: M5, a stack of one-dimensional convolutions, as in torchaudio's tutorial."""

from __future__ import annotations

import sys

import torch
from side_by_side import compare, randomized
from torch import nn
from torch.nn import functional

import convoy


class M5(nn.Module):
    """[n, 1, samples] to logarithms of probabilities [n, classes]."""

    def __init__(self, classes: int = 35, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *self._layer(1, width, 80, 16),
            *self._layer(width, width, 3),
            *self._layer(width, 2 * width, 3),
            *self._layer(2 * width, 2 * width, 3),
        )
        self.classifier = nn.Linear(2 * width, classes)

    @staticmethod
    def _layer(inputs: int, outputs: int, taps: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv1d(inputs, outputs, taps, stride), nn.BatchNorm1d(outputs), nn.ReLU(), nn.MaxPool1d(4)]

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        """[n, 1, samples] to [n, classes]."""
        return functional.log_softmax(self.classifier(self.layers(waveform).mean(-1)), dim=-1)


def main(samples: int = 16000, width: int = 32, settings: convoy.Settings | None = None) -> float:
    """Print the comparison for one waveform; the largest difference."""
    return compare("M5 on audio", randomized(M5(width=width)), (torch.randn(1, 1, samples),), settings)[1]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
