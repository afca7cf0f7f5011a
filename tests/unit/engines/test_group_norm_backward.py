"""GroupNorm's backward pass on a channels_last input that needs no gradient: PyTorch crashes there, so a child process tries."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import convoy
from convoy.engines.group_norm_backward import GROUP_NORM_BACKWARD, group_norm_gradients
from convoy.engines.known_defects import defects_here
from convoy.engines.torch_operators import resolve
from convoy.measurement.device.detect import detect_target

NAME = "torch-group-norm-backward-channels-last"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 3)).to(memory_format=torch.channels_last)


def example() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, 6, 5, generator=generator).contiguous(memory_format=torch.channels_last)


def exact() -> list[torch.Tensor]:
    """Gradients by PyTorch in float64 and nchw, where it is right."""
    model, x = net().double().to(memory_format=torch.contiguous_format), example().contiguous().double()
    mse_loss(model(x), torch.zeros((), dtype=torch.float64).expand(2, 3, 4, 3)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def in_child(run: Callable[[Path], None], folder: Path) -> None:
    """Run a function of this module in a new process; it fails where that crashes or raises."""
    child = multiprocessing.get_context("spawn").Process(target=run, args=(folder,))
    child.start()
    child.join(120)
    assert child.exitcode == 0


def agree(model: nn.Module) -> None:
    for parameter, wanted in zip(model.parameters(), exact(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.float(), rtol=1e-4, atol=1e-5)


def train(folder: Path) -> None:
    """A step whose plan is kept, with a note; its fallback, behind a hook; and both passes of a compiled model."""
    model, y = net(), torch.zeros(2, 3, 4, 3)
    settings = convoy.Settings(effort="none", deny_engines=("inductor",), db=folder / "perf.db")
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    step = convoy.training_step(model, mse_loss, sgd, (example(), y), settings=settings)
    assert not step.plan.baseline, step.notes
    assert any(NAME in note for note in step.plan.notes), step.plan.notes
    step(example(), y)
    agree(model)
    model[1].register_forward_hook(lambda module, inputs, output: None)
    with pytest.warns(UserWarning, match="the stock step runs"):
        step(example(), y)
    agree(model)

    options = {"effort": "none", "deny_engines": ("inductor",), "db": folder / "perf.db"}
    compiled = torch.compile(net(), backend="convoy", options=options)
    mse_loss(compiled(example()), y).backward()
    agree(compiled)


def test_a_training_step_and_a_compiled_model_do_not_crash(tmp_path: Path):
    in_child(train, tmp_path)


@pytest.mark.parametrize("wanted", [[False, True, True], [True, True, True], [False, True, False]])
def test_gradients_that_were_not_asked_for_are_none(wanted: list[bool]):
    assert resolve(GROUP_NORM_BACKWARD) is group_norm_gradients
    x, weight = example(), torch.rand(4)
    y, mean, rstd = torch.native_group_norm(x, weight, None, 2, 4, 30, 2, 1e-5)
    found = group_norm_gradients(torch.ones_like(y), x, mean, rstd, weight, 2, 4, 30, 2, wanted)
    assert [made is not None for made in found] == wanted
    sizes = (mean, rstd, weight, 2, 4, 30, 2, [True, True, True])
    right = torch.ops.aten.native_group_norm_backward(torch.ones_like(y), x, *sizes)
    for made, other in zip(found, right, strict=True):
        assert made is None or torch.equal(made, other)


def test_doctor_knows_it():
    assert NAME in {defect.name for defect in defects_here(detect_target("cpu"))}
