"""Memory of a process, as Linux counts it: resident bytes now, and their peak."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Bytes of a process that lie in memory now; 0 where the process or the count is not there."""
    return _status(Path(f"/proc/{pid}/status"), "VmRSS")


def available_bytes() -> int:
    """Bytes that programs can still be given without swapping; 0 where it is not known."""
    return _status(Path("/proc/meminfo"), "MemAvailable")


def restart_peak() -> None:
    """Count this process's peak from now on, where Linux allows it (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def trim() -> None:
    """Give freed memory back to the system (glibc's malloc_trim), so that it does not count as used."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def peak_bytes() -> int:
    """Most bytes of this process that lay in memory since `restart_peak`, or since it began."""
    found = _status(Path("/proc/self/status"), "VmHWM")
    if found or os.name == "nt":
        return found
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(path: Path, name: str) -> int:
    try:
        match = re.search(rf"^{name}:\s*(\d+) kB", path.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) << 10 if match else 0
