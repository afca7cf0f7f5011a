"""Video by torchvision's nets: actions in a clip (R3D-18), and the flow between two frames (RAFT)."""

from __future__ import annotations

import sys

import torch
from side_by_side import compare, randomized
from torch import nn

import convoy
from convoy.zoo import import_torchvision


def clip(
    size: int = 112, frames: int = 16, settings: convoy.Settings | None = None, model: nn.Module | None = None
) -> float:
    """Print the comparison for one clip; the largest difference."""
    model = model or import_torchvision().models.video.r3d_18(weights=None)
    return compare("R3D", randomized(model), (torch.rand(1, 3, frames, size, size),), settings)[1]


def flow(size: int = 256, updates: int = 12, settings: convoy.Settings | None = None) -> float:
    """Print the comparison for two frames of at least 128 x 128 pixels; the largest difference of the flows."""
    model = import_torchvision().models.optical_flow.raft_small(weights=None)
    frames = (torch.rand(1, 3, size, size) * 2 - 1, torch.rand(1, 3, size, size) * 2 - 1, updates)
    return compare("RAFT", randomized(model), frames, settings)[1]


if __name__ == "__main__":
    clip(*map(int, sys.argv[1:3]))
    flow()
