"""Keeps freed memory in the process: on a CPU, tensors otherwise cost a page fault for every 4 KiB.

glibc returns freed blocks of 128 KiB and more to the system, and the system hands them out again as zeroed pages, one fault
each. Feature maps are such blocks: GoogLeNet at batch 1 took 22.3 ms so and 18.3 ms with the memory kept, and tuning AlexNet
took 22 s instead of 59 s (two cores of an AMD EPYC 9004).
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3), from glibc's malloc.h."""

KEPT_BYTES: Final = 1 << 30
"""Freed memory at the heap's end that is kept: more than the feature maps of any common net at batch 8."""

MAPPED_BYTES: Final = (1 << 30, 32 << 20)
"""Block size from which allocations are still mapped by themselves: the first value that this glibc accepts. Some refuse more
than HEAP_MAX_SIZE / 2, 32 MiB; with that, tuning AlexNet (packed copies of its 151 MB matrix) took 51 s instead of 22 s."""

TOP_PAD_BYTES: Final = 64 << 20
"""Amount by which the heap grows at a time."""


@cache
def keep_freed_memory() -> bool:
    """Tell the C library, once for the process, to keep freed memory; False if it is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)

    def accepts(parameter: int, value: int) -> bool:
        return library.mallopt(parameter, value) == 1

    mapped = any(accepts(_M_MMAP_THRESHOLD, size) for size in MAPPED_BYTES)
    kept, grown = accepts(_M_TRIM_THRESHOLD, KEPT_BYTES), accepts(_M_TOP_PAD, TOP_PAD_BYTES)
    return mapped and kept and grown
