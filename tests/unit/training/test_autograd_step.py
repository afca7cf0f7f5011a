"""PyTorch's own step on static tensors: the gradients and updates of an ordinary training loop, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy.capture.loss_module import LossModule
from convoy.training.autograd_step import AutogradStep, in_parameter_layout


class Unused(nn.Module):
    """A net with a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_are_those_of_a_loop(accumulate: int) -> None:
    torch.manual_seed(0)
    model = Unused().to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin))
    batch = torch.randn(4, 3, 8, 8), torch.arange(4)
    learned = [p for p in model.parameters() if p.requires_grad]
    module = LossModule(model, cross_entropy, None, scaled=False)
    work = AutogradStep(module, tuple, learned, accumulate, lambda _: ours.step())
    for _ in range(2):
        theirs.zero_grad(set_to_none=True)
        for micro in range(accumulate):
            loss = work(batch, first=micro == 0, last=micro == accumulate - 1)
            wanted = cross_entropy(twin(batch[0]), batch[1])
            (wanted / accumulate).backward()
            assert torch.equal(loss, wanted.detach())
        theirs.step()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, other)
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                assert torch.equal(mine.grad, other.grad)
                assert mine.grad.stride() == mine.stride()
    assert model.spare.grad is None


def test_gradients_have_their_parameters_memory_format() -> None:
    parameter = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    gradient = torch.randn(4, 3, 3, 3)
    found = in_parameter_layout(parameter, gradient)
    assert found.stride() == parameter.stride() != gradient.stride()
    assert torch.equal(found, gradient)
    assert in_parameter_layout(parameter, found) is found
