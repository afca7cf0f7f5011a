"""An optimised net with a program, whatever the clock says, for tests of what surrounds programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from convoy.pipeline.check import end_to_end

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([1, 3])


class Classifier(nn.Module):
    """A net with an attribute, an option and two outputs, one of which lies as the input does."""

    num_classes = 5

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(256, 5)

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, *, maps: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        made = self.norm(self.conv(x)).relu()
        if scale is not None:
            made = made * scale
        scores = self.head(made.flatten(1))
        return (scores, made) if maps else scores


def classifier() -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Classifier().eval()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@contextmanager
def always_kept() -> Iterator[None]:
    """Programs are kept although PyTorch may be as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_to_end, "falls_back", lambda *_: (False, ""))
        yield
