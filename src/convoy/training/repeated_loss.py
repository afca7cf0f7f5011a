"""Does a step repeat? From equal tensors and random states, PyTorch's step must give the loss that it gave before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from convoy.engines.torch_flags import unsearched_convolutions, without_onednn
from convoy.errors import CaptureError
from convoy.pipeline.check.rounding import fixed_seed
from convoy.training.stock_step import StockStep

_CPU_ROUNDINGS: Final = 4.0
_GPU_ROUNDINGS: Final = 64.0
"""Roundings that two runs may differ by. On a GPU some kernels add in another order in every run."""


def check_repeats(step: StockStep) -> None:
    """Compare the losses of two runs between which all tensors and random states are put back.

    A graph holds what Python computes as constants. So the model and its loss must not count in an iterator, an array, an
    attribute of a class or another object that nobody watches. If a run fails, nothing is said: the end-to-end check does.

    Args:
        step: PyTorch's step, on copies; changed as by a call.

    Raises:
        CaptureError: the second loss is another one.
    """
    tensors = step.tensors
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        first, second = _losses(step, before, device)
        if first != second and device.type == "cpu":
            with without_onednn():  # some of its convolutions read memory that nobody wrote (`known_defects`)
                first, second = _losses(step, before, device)
    except Exception:  # out of memory, or an error of the user's code
        return
    allowed = _GPU_ROUNDINGS * step.unit_of_all if first.is_cuda else _CPU_ROUNDINGS * step.unit
    if bool((first - second).abs() > allowed * first.abs()):
        raise CaptureError(
            f"with the same weights, batch and random numbers, two calls give the losses {first.item():.6g} and"
            f" {second.item():.6g}, so the model or its loss counts its calls, or draws numbers of its own"
        )


def _losses(step: StockStep, before: Mapping[str, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The losses of two runs from the same tensors and random states."""
    found: list[torch.Tensor] = []
    for _ in range(2):
        with torch.no_grad():
            for name, tensor in step.tensors.items():
                if not torch.equal(tensor, before[name]):
                    tensor.copy_(before[name])
        with fixed_seed(), unsearched_convolutions(device):
            found.append(step.forward()[-1].detach().double())
    return found
