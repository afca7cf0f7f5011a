"""A part in training mode inside a model in evaluation mode: the program computes evaluation, and a warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from convoy.pipeline.model_arguments import warn_of_training_parts


class Path(nn.Module):
    """Stochastic depth, as other packages write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(()) if self.training else x


def net(inside: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), inside).eval()
    inside.train()
    return model


EFFECTIVE = [
    lambda: nn.Dropout(0.5),
    lambda: nn.BatchNorm2d(4),
    lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    Path,
]
IDLE = [
    lambda: nn.Dropout(0.0),
    lambda: nn.BatchNorm2d(4, track_running_stats=False),
    lambda: nn.InstanceNorm2d(4),
    nn.ReLU,
]


@pytest.mark.parametrize("make", EFFECTIVE)
def test_a_part_whose_training_flag_matters_is_named(make: Callable[[], nn.Module]) -> None:
    with pytest.warns(UserWarning, match=r"in training mode \(1\), the model in evaluation mode"):
        warn_of_training_parts(net(make()))


@pytest.mark.parametrize("make", IDLE)
def test_a_part_whose_training_flag_does_nothing_is_not(make: Callable[[], nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_training_parts(net(make()))
        warn_of_training_parts(net(nn.Dropout(0.5)).train())
        warn_of_training_parts(net(nn.Dropout(0.5)).eval())
