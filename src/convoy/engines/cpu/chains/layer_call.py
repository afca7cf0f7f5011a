"""A convolution's kernel as a chain's own kernel calls it (`Layer` of layer.h)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final, cast

from convoy.engines.cpu.cpu_direct import BAND_BLOCKS, PIXELS
from convoy.engines.cpu.native_launch import Native, NativeExecutable
from convoy.target import Target

LAYER_H: Final = Path(__file__).with_name("layer.h")
"""The header of every source of this folder."""

ANY_CPU: Final = Target("cpu", "", "", 1, 0, 0)
"""The target whose support a chain asks its layers' engines for: their refusals depend on the problem alone."""

MOST_WORDS: Final = 32
MOST_POINTERS: Final = 16
"""As in layer.h."""


class LayerCall(ctypes.Structure):
    """`Layer` of layer.h."""

    _fields_ = (
        ("call", ctypes.c_void_p),
        ("settings", ctypes.c_int64 * MOST_WORDS),
        *((name, ctypes.c_int64) for name in ("pointers", "x", "residual", "y")),
    )


def layer_call(kernel: NativeExecutable, launch: Native, rows: int) -> LayerCall:
    """A launch of `cpu.direct` or `cpu.depthwise` for one image, by one thread, of at most so many rows at a time."""
    settings = type(launch.settings).from_buffer_copy(launch.settings)
    assert isinstance(settings, ctypes.Structure)
    settings.n = settings.threads = 1
    if hasattr(settings, "bands"):
        settings.groups, settings.bands = 1, -(-rows * settings.q // (PIXELS * BAND_BLOCKS))
    words = (ctypes.c_int64 * MOST_WORDS)(*(getattr(settings, field[0]) for field in settings._fields_))
    where = {operand: place for place, operand in enumerate(launch.tensors) if isinstance(operand, tuple)}
    call = ctypes.cast(cast("Any", kernel.call), ctypes.c_void_p)
    assert len(launch.tensors) <= MOST_POINTERS
    return LayerCall(call, words, len(launch.tensors), where["arg", 0], where.get(("arg", 1), -1), where["result", 0])
