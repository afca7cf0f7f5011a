"""Matrix products as exact as the problem asks for, whatever torch's process-wide flags say."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_LOCK = threading.RLock()


def products(numerics: str, device: torch.device) -> AbstractContextManager[None]:
    """A context in which torch's matrix products keep to `numerics`.

    `as_torch` leaves torch's flags as they are. Otherwise fp32 products are fp32 and half products are summed in fp32,
    also where the flags (`torch.set_float32_matmul_precision`, `torch.backends.*.matmul.fp32_precision`) allow less. The flags
    are process-wide: while one launch is being queued, products that other threads queue are exact too.
    """
    if numerics == "as_torch" or not _loose(device):
        return nullcontext()
    return _tightened(device)


def _matmul_flags(device: torch.device) -> Any:
    """`torch.backends.*.matmul`; PyTorch's type stubs lack oneDNN's."""
    backends: Any = torch.backends
    return backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul


def _loose(device: torch.device) -> bool:
    backends: Any = torch.backends
    setting = _matmul_flags(device).fp32_precision
    if setting == "none":
        setting = backends.fp32_precision
    if setting not in ("none", "ieee"):
        return True
    flags = torch.backends.cuda.matmul
    halves = flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction
    return device.type == "cuda" and any(halves)


@contextmanager
def _tightened(device: torch.device) -> Generator[None]:
    flags = torch.backends.cuda.matmul
    matmul = _matmul_flags(device)
    with _LOCK:
        precision = matmul.fp32_precision
        halves = flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction
        try:
            matmul.fp32_precision = "ieee"
            flags.allow_fp16_reduced_precision_reduction = flags.allow_bf16_reduced_precision_reduction = False
            yield
        finally:
            matmul.fp32_precision = precision
            flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction = halves
