"""Operators that PyTorch's tracers split although PyTorch has a kernel for each of them: traced whole inside `undecomposed`.

AOTAutograd records a bilinear upsampling as four gathers and some sums, its gradient as four scatters, and the gradient of a
silu as seven operators, one of which fills a tensor with ones. PyTorch runs one kernel for each. Such a graph is slower
than PyTorch's own run, its gathers' gradients are added up by atomic operations on a GPU, and no engine knows the layer again.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch._C import DispatchKey

aten: Any = torch.ops.aten

_SIDES: Final = {
    "nearest": ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    "nearest_exact": ("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    "linear": ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
    "cubic": ("upsample_bicubic2d",),
    "antialiased": ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
}

RESIZERS: Final = tuple(name for names in _SIDES.values() for name in names)
"""Operators of `torch.nn.functional.interpolate`. PyTorch registers functions in Python for them, above autograd."""

GRADIENTS: Final = ("silu_backward", "mish_backward")
"""Gradients with a kernel that are composites as well: tracers take composites apart."""

_LOCK: Final = threading.Lock()
_HELD: Final[dict[Any, dict[Any, Any]]] = {}
"""Operator → PyTorch's table of functions, while tables without decompositions are in its place."""
_ENTERED: Final[list[None]] = []
"""One item for each `undecomposed` that has been entered and not left."""


@contextmanager
def undecomposed(*, deterministic: bool = False) -> Generator[None]:
    """Trace these operators whole, as `aten.upsample_bilinear2d.default` and `aten.silu_backward.default` say.

    With `deterministic`, and under `torch.use_deterministic_algorithms`, PyTorch splits them: on a GPU, its kernels of
    resizing gradients give different bits from run to run.

    Several threads may be inside: the first changes PyTorch's tables, the last restores them. Runs on real tensors, and Inductor,
    which has decompositions of its own, compute the same as outside.
    """
    if deterministic or torch.are_deterministic_algorithms_enabled():
        yield
        return
    with _LOCK:
        if not _ENTERED:
            _hold_tables()
        _ENTERED.append(None)
    try:
        yield
    finally:
        with _LOCK:
            _ENTERED.pop()
            if not _ENTERED:
                _restore_tables()


@cache
def _operators() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The resizing operators' overloads, and the gradients."""
    resizers = [getattr(aten, name) for name in RESIZERS if hasattr(aten, name)]
    overloads = [getattr(packet, name) for packet in resizers for name in ("default", "vec") if hasattr(packet, name)]
    return tuple(overloads), tuple(getattr(aten, name).default for name in GRADIENTS)


def _hold_tables() -> None:
    resizers, gradients = _operators()
    for operator in (*resizers, *gradients):
        _HELD[operator] = dict(operator.py_kernels)
    for operator in resizers:  # PyTorch's own kernels, in C++, have their gradients and their shapes
        operator.py_kernels.pop(DispatchKey.Autograd, None)
        operator.py_kernels.pop(DispatchKey.CompositeImplicitAutograd, None)
        operator._dispatch_cache.clear()
    for operator in gradients:
        operator.py_kernels[DispatchKey.CompositeImplicitAutograd] = _not_decomposed
        operator._dispatch_cache.clear()


def _restore_tables() -> None:
    for operator, table in _HELD.items():
        operator.py_kernels.clear()
        operator.py_kernels.update(table)
        operator._dispatch_cache.clear()
    _HELD.clear()


def _not_decomposed(*_: object, **__: object) -> Any:
    """Tells a tracer that an operator is not to be split."""
    return NotImplemented
