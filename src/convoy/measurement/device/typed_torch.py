"""Functions of torch that have no complete type annotations, with the types that measuring uses."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch


class GpuProperties(Protocol):
    """What `torch.cuda.get_device_properties` returns of a GPU."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    pci_domain_id: int
    pci_bus_id: int
    pci_device_id: int


def gpu_properties(index: int) -> GpuProperties:
    """Properties of one of torch's GPUs."""
    return cast("Any", torch.cuda).get_device_properties(index)


def set_memory_fraction(fraction: float) -> None:
    """Let this process hold at most a fraction, 0..1, of the current GPU's memory."""
    cast("Any", torch.cuda).set_per_process_memory_fraction(fraction)


def l2_norm(tensor: torch.Tensor) -> float:
    """The L2 norm of all elements."""
    return float(cast("Any", tensor).norm())


def split(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Parts of a tensor along its first dimension, of `size` rows; the last may be smaller."""
    return cast("Any", tensor).split(size)
