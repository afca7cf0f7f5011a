"""Tensor maps (CUtensorMap) as bytes: the driver puts another address into one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from convoy.engines.compilers.cuda_bindings import driver


def with_address(tensor_map: bytes, address: int, checked: Callable[[tuple[Any, ...]], object]) -> bytes:
    """A tensor map with another address.

    Args:
        tensor_map: its 128 bytes.
        address: of device memory, a multiple of 16.
        checked: raises an error if the driver's answer is one.
    """
    cuda = driver()
    found = cuda.CUtensorMap()
    found.opaque = [cuda.cuuint64_t(word) for (word,) in struct.iter_unpack("<Q", tensor_map)]
    checked(cuda.cuTensorMapReplaceAddress(found, address))
    return struct.pack("<16Q", *(int(word) for word in found.opaque))
