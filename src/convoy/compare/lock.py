"""Is another run on this device? A lock for each device among this user's processes, and what nvidia-smi says of a GPU's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
def device_lock(target: Target, folder: Path | None = None, count: int = 1) -> Iterator[str]:
    """Hold the device's lock; gives a warning where another Convoy holds it (the run goes on), else an empty text.

    The system lets go of the locks of a process that dies.

    Args:
        target: the device.
        folder: where locks lie; None: the user's cache folder.
        count: how many GPUs are used, of those that this process sees the first ones.
    """
    place = folder if folder is not None else cache_folder()
    name = re.sub(r"[^a-z0-9]+", "-", target.name.lower()).strip("-")
    with ExitStack() as held:
        warning = ""
        for which in gpus(count) if target.device == "cuda" else [""]:
            try:
                place.mkdir(parents=True, exist_ok=True)
                lock = FileLock(place / f"compare-{target.device}-{name}{which}.lock")
                held.enter_context(lock.acquire(timeout=0))
            except Timeout:
                warning = f"another run of Convoy is on this {target.device.upper()}: figures of both are worth little"
            except OSError:  # a folder that cannot be written: nobody is noticed, and nobody need be stopped for that
                continue
        yield warning


@contextmanager
def claim(target: Target, tell: Callable[[str], None], count: int = 1) -> Iterator[list[str]]:
    """Hold the device's lock for a run; gives what makes its figures doubtful, told as warnings too.

    Args:
        target: the device.
        tell: told each warning.
        count: how many GPUs are used.
    """
    with device_lock(target, count=count) as warning:
        notes = [note for note in (warning, others_at_work(target)) if note]
        for note in notes:
            tell(f"warning: {note}")
        yield notes


def gpus(count: int) -> list[str]:
    """Words for the first GPUs that this process sees: runs on different GPUs of one host are no trouble to each other."""
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return [f"-{re.sub(r'[^A-Za-z0-9]+', '-', word)}" for word in (visible or map(str, range(count)))][:count]


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
