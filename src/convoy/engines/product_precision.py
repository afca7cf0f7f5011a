"""Matrix products as exact as the problem asks for, whatever torch's process-wide flags say."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from convoy.engines.torch_flags import own_precision

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
    backend = torch.backends.cudnn if device.type == "cuda" else torch.backends.mkldnn
    matmul = _matmul_flags(device)
    with _LOCK:
        precision = own_precision(matmul, backend)
        halves = {name: _reductions(name) for name in _REDUCTIONS}
        try:
            matmul.fp32_precision = "ieee"
            for name, before in halves.items():
                setattr(flags, name, (False, before[1]) if isinstance(before, tuple) else False)
            yield
        finally:
            matmul.fp32_precision = precision
            for name, before in halves.items():
                setattr(flags, name, before)


_REDUCTIONS: Final = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def _reductions(name: str) -> bool | tuple[bool, bool]:
    """The flag as it must be written to be as it was: a value without one for split-K would allow split-K."""
    flags: Any = torch.backends.cuda.matmul
    split_k = getattr(flags, f"{name}_split_k", None)
    return getattr(flags, name) if split_k is None else (getattr(flags, name), split_k)
