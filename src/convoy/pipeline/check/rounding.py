"""The effect of rounding on a result: the allowed error of another implementation if there is no float64 run.

A function is run again on inputs that are changed by one rounding each. Another order of operations changes the result by about
as much; a fault changes it more.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch

from convoy.engines.torch_flags import precision_owners

TF32_ROUNDING = 2.0**-11
"""Unit roundoff of TF32, which has 10 bits of mantissa."""


def unit_roundoff(dtypes: Iterable[torch.dtype], *, cuda: bool) -> float:
    """The largest relative error of one rounding in a computation, by its least precise dtype.

    Args:
        dtypes: dtypes of its values.
        cuda: whether it runs on a GPU, where fp32 products may be TF32. On a CPU torch's flags may make them bf16.
    """
    found = [dtype for dtype in dtypes if dtype.is_floating_point]
    unit = max((torch.finfo(dtype).eps / 2 for dtype in found), default=0.0)
    owners = precision_owners()
    precisions = {owners[name].fp32_precision for name in ("cudnn.conv", "cuda.matmul")}
    on_tf32 = cuda and torch.float32 in found and "tf32" in precisions
    if not cuda and torch.float32 in found and _cpu_may_round_to_bf16():
        return max(unit, torch.finfo(torch.bfloat16).eps / 2)
    return max(unit, TF32_ROUNDING) if on_tf32 else unit


def _cpu_may_round_to_bf16() -> bool:
    """Whether torch's flags let oneDNN round the operands of fp32 products to bf16 or TF32."""
    if not torch.backends.mkldnn.is_available():
        return False
    owners = precision_owners()
    return any(owners[name].fp32_precision in ("bf16", "tf32") for name in ("mkldnn.conv", "mkldnn.matmul"))


class InputPerturbation:
    """Changes every value of a tensor by a random relative error of up to `unit`, the same in every run."""

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._draws = torch.Generator().manual_seed(0)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """A new tensor of the same shape, strides and dtype. A tensor without floating-point values is returned itself."""
        if not value.is_floating_point():
            return value
        draws = torch.Generator(value.device).manual_seed(int(torch.randint(1 << 62, (), generator=self._draws)))
        share = torch.rand(value.shape, generator=draws, device=value.device).mul_(2 * self._unit).add_(1 - self._unit)
        return torch.empty_like(value).copy_(value.detach().float() * share)


@contextmanager
def fixed_seed() -> Generator[None]:
    """Draw random numbers from a fixed seed inside, and restore the generators afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    random: Any = torch.random
    with random.fork_rng(devices=devices):
        random.manual_seed(0)
        yield
