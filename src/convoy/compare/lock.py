"""Is another run on this device? A lock for each device among this user's processes, and what nvidia-smi says of a GPU's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from convoy.compare.manifest import ask_gpu
from convoy.perfdb.location import cache_folder
from convoy.target import Target

BUSY_SHARE = 0.5
"""Processes that want to run, per core, from which on a machine is called busy before we begin."""


BUSY_PERCENT = 10.0
"""Utilisation of a GPU, as nvidia-smi has it, from which on another program is at work there: an idle one shows 0."""


@contextmanager
def device_lock(target: Target, folder: Path | None = None) -> Iterator[str]:
    """Hold the device's lock; gives a warning where another Convoy holds it (the run goes on), else an empty text.

    The system lets go of the lock of a process that dies.
    """
    place = folder if folder is not None else cache_folder()
    name = re.sub(r"[^a-z0-9]+", "-", target.name.lower()).strip("-")
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place / f"compare-{target.device}-{name}.lock")
        lock.acquire(timeout=0)
    except Timeout:
        yield f"another run of Convoy is on this {target.device.upper()}: figures of both are worth little"
        return
    except OSError:  # a folder that cannot be written: nobody is noticed, and nobody need be stopped for that
        yield ""
        return
    try:
        yield ""
    finally:
        lock.release()


def others_at_work(target: Target) -> str:
    """A warning where other programs use the device now, else an empty text."""
    if target.device == "cuda":
        busy = ask_gpu("utilization.gpu", units=False)  # listed processes have other ids inside a container
        share = float(busy[0]) if busy and busy[0].isdecimal() else 0.0
        return f"another program keeps the GPU {share:.0f} % busy" if share > BUSY_PERCENT else ""
    if not hasattr(os, "getloadavg"):
        return ""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return (
        f"{load:.1f} processes wanted to run in the last minute on {cores} cores" if load > BUSY_SHARE * cores else ""
    )
