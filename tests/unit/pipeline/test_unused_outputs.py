"""Regions of a net that uses only some outputs of an operator: the graph names the others ''."""

import pytest
import torch
from torch import nn

from convoy.measurement import detect_target
from convoy.pipeline.net import capture_net
from convoy.settings import Settings, checked_settings
from convoy.target import Target

H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)


class Halves(nn.Module):
    """The first half of the channels is dropped; the second goes through all that an engine may fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, x = self.first(x).split(8, 1)
        return torch.relu(self.norm(self.second(x)) + x).mean((2, 3), keepdim=True)


@pytest.mark.parametrize("target", [detect_target("cpu"), H100], ids=["cpu", "h100"])
def test_an_output_that_nobody_reads(target):
    net = capture_net("halves", Halves().eval(), (torch.randn(2, 3, 12, 12),), {}, checked_settings(Settings()), target)
    assert any("" in node.outputs for node in net.captured.graph.nodes)
    assert any(region.nodes for region in net.regions)
