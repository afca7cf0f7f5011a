"""Matrix products as exact as the problem asks for, whatever torch's process-wide flags say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

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


def _matmul(device: torch.device):
    return torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul


def _loose(device: torch.device) -> bool:
    setting = _matmul(device).fp32_precision
    if setting == "none":
        setting = torch.backends.fp32_precision
    if setting not in ("none", "ieee"):
        return True
    flags = torch.backends.cuda.matmul
    halves = flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction
    return device.type == "cuda" and any(halves)


@contextmanager
def _tightened(device: torch.device) -> Iterator[None]:
    flags = torch.backends.cuda.matmul
    matmul = _matmul(device)
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
