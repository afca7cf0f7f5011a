"""The judge of the tests beside this one: it passes PyTorch's own steps, and sees the faults that are planted. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.gpu.program.judge import Judge

Fault = Callable[[nn.Sequential], None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained(
    *,
    gradients: Fault | None = None,
    end: Fault | None = None,
    amp: torch.dtype | None = None,
    clip: float | None = None,
) -> Judge:
    """Three steps by PyTorch, with faults in every step's gradients or in what the step leaves."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, 5))
    optimizer, judge = sgd(model), Judge(model, sgd, amp=amp, clip=clip)
    for _ in range(3):
        x, y = torch.randn(8, 3, 10, 10), torch.arange(8) % 5
        with judge.step((x, y)) as losses:
            optimizer.zero_grad()
            with torch.autocast("cpu", amp or torch.bfloat16, enabled=amp is not None):
                loss = cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                if gradients is not None:
                    gradients(model)
                optimizer.step()
                if end is not None:
                    end(model)
    return judge


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_pytorchs_own_steps_pass(amp: torch.dtype | None, clip: float | None):
    trained(amp=amp, clip=clip).check()


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.0, 0.9, 1.1])
@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.bias", "5.weight", "5.bias"])
def test_a_gradient_of_one_parameter_that_is_wrong_is_named(name: str, factor: float, amp: torch.dtype | None):
    judge = trained(gradients=lambda model: model.get_parameter(name).grad.mul_(factor), amp=amp)
    with pytest.raises(AssertionError, match=rf"^{name}: "):
        judge.check()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda model: model[5].bias.add_(1e-4), r"^5\.bias: its updates are off"),
        (lambda model: model[1].running_var.mul_(1.1), r"^1\.running_var: "),
        (lambda model: model[1].running_mean.zero_(), r"^1\.running_mean: "),
    ],
    ids=["update", "variance", "mean"],
)
def test_what_a_step_leaves_wrong_is_named(end: Fault, words: str):
    with pytest.raises(AssertionError, match=words):
        trained(end=end).check()


def test_a_clipping_that_never_clips_is_noticed():
    with pytest.raises(AssertionError, match="nothing to clip"):
        trained(clip=100.0).check()


def test_counters_must_be_counted():
    with pytest.raises(AssertionError, match="num_batches_tracked"):
        trained(end=lambda model: model[1].num_batches_tracked.zero_())
