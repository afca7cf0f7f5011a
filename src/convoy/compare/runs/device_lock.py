"""Detects other runs on a device: a lock for each device among this user's processes, and nvidia-smi's list for a GPU.

A run that finds a lock taken leaves a marker beside it, and holds that as long as it works: so the run that has the lock finds
out, when it has done its work, that it was not alone, and one that comes later that somebody without a lock is still at work.
"""

from __future__ import annotations

import dataclasses
import os
import re
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from convoy.compare.runs.manifest import ask_gpu, ask_tool
from convoy.compare.runs.runfile import Run
from convoy.perfdb.location import cache_folder
from convoy.target import Target

BUSY_SHARE = 0.5
"""Processes that want to run, per core, from which on a machine is called busy before we begin."""

BUSY_PERCENT = 10.0
"""Utilisation of a GPU, as nvidia-smi has it, from which on another program is at work there: an idle one shows 0."""

MARK_S = 1.0
"""Most seconds until a new marker is locked: a process that removes stale markers may have it open."""


class RunWarnings(list[str]):
    """Reasons to doubt a run's figures.

    Args:
        found: reasons known when the run begins.
        look: returns reasons found since.
        tell: told each line that is new.
    """

    def __init__(self, found: Sequence[str], look: Callable[[], str], tell: Callable[[str], None]) -> None:
        super().__init__(found)
        self._look, self._tell = look, tell

    def look(self) -> None:
        """Note a run that came since, if one did; at the end of the work, before the last state of the run file is written."""
        note = self._look()
        if note and note not in self:
            self.append(note)
            self._tell(f"warning: {note}")


def noted(run: Run, notes: Sequence[str]) -> Run:
    """The run with these lines among its manifest's notes, each once."""
    lines = list(dict.fromkeys([*run.manifest.get("notes", []), *notes]))
    return dataclasses.replace(run, manifest={**run.manifest, "notes": lines})


@contextmanager
def claim(target: Target, tell: Callable[[str], None], count: int = 1) -> Generator[RunWarnings]:
    """Hold the device's lock for a run; returns the reasons to doubt its figures, and reports them as warnings.

    A run that comes later is noted by `look`, which is called once more at the end: a caller takes the notes into the run file
    (`noted`) after its work too.

    Args:
        target: the device.
        tell: told each warning.
        count: how many GPUs are used.
    """
    with _held(target, cache_folder(), count) as places:
        warning = next((place.warning for place in places if place.warning), "")
        several = target.device == "cuda" and count > 1
        busy = gpus_at_work(count) if several else others_at_work(target)
        notes = RunWarnings(
            [note for note in (warning, busy) if note],
            lambda: "" if warning else next(filter(None, (place.came() for place in places)), ""),
            tell,
        )
        for note in notes:
            tell(f"warning: {note}")
        try:
            yield notes
        finally:
            notes.look()


@contextmanager
def device_lock(target: Target, folder: Path | None = None, count: int = 1) -> Generator[str]:
    """Hold the device's lock; gives a warning where another Convoy holds it (the run goes on), else an empty text.

    The system lets go of the locks of a process that dies.

    Args:
        target: the device.
        folder: where locks lie; None: the user's cache folder.
        count: how many GPUs are used, of those that this process sees the first ones.
    """
    with _held(target, folder if folder is not None else cache_folder(), count) as places:
        yield next((place.warning for place in places if place.warning), "")


@contextmanager
def _held(target: Target, folder: Path, count: int) -> Generator[list[_Place]]:
    """This run's places on the GPUs that it uses, or on the CPU; none where nothing can be written."""
    name = re.sub(r"[^a-z0-9]+", "-", target.name.lower()).strip("-")
    places: list[_Place] = []
    with ExitStack() as held:
        for which in gpus(count) if target.device == "cuda" else [""]:
            # A folder that cannot be written: nobody is noticed, and nobody need be stopped for that.
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                place = _Place(folder / f"compare-{target.device}-{name}{which}.lock", target.device)
                place.take()
                held.callback(place.leave)
                places.append(place)
        yield places


class _Place:
    """A run's place on one device: the lock, or else a marker beside it.

    Args:
        path: the lock.
        device: `cpu` or `cuda`.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.warning = path, ""
        self._words = f"this {device.upper()}"
        self._lock = FileLock(path)
        self._mark: FileLock | None = None
        self._known: set[Path] = set()

    def take(self) -> None:
        """Take the lock, or leave a marker; raises OSError where no lock can be written."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self.warning = f"another run of Convoy is on {self._words}: figures of both are worth little"
            self._mark = FileLock(self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}"))
            with suppress(OSError):
                self._mark.acquire(timeout=MARK_S)
            return
        self._clear()
        self._known = set(self._marks())
        if self._known:  # their runs came while another had the lock that has ended since
            self.warning = f"another run of Convoy is on {self._words}: figures of both are worth little"

    def came(self) -> str:
        """A line where another run came while this one had the lock."""
        if self._mark is None and set(self._marks()) - self._known:
            return f"another run of Convoy came to {self._words} meanwhile: figures of both are worth little"
        return ""

    def leave(self) -> None:
        """Release the lock. A marker stays for the process that holds the lock; it removes the markers that it saw."""
        if self._mark is not None:
            self._mark.release()
            with suppress(OSError):  # some systems take the file away with the lock
                Path(self._mark.lock_file).touch()
            return
        self._clear()
        self._lock.release()

    def _marks(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.name}.*"))

    def _clear(self) -> None:
        """Remove markers of runs that are over."""
        for mark in self._marks():
            with suppress(OSError, Timeout), FileLock(mark).acquire(timeout=0):
                mark.unlink(missing_ok=True)


def gpus(count: int) -> list[str]:
    """Words for the first GPUs that this process sees: runs on different GPUs of one host are no trouble to each other."""
    return [f"-{re.sub(r'[^A-Za-z0-9]+', '-', word)}" for word in _seen(count)]


def _seen(count: int) -> list[str]:
    """The first GPUs that this process sees, by number or by (the beginning of) their UUID."""
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return (visible or [str(index) for index in range(count)])[:count]


def gpus_at_work(count: int) -> str:
    """A warning where other programs use one of the first GPUs that this process sees, else an empty text."""
    answer = ask_tool(["nvidia-smi", "--query-gpu=index,uuid,utilization.gpu", "--format=csv,noheader,nounits"])
    busy: list[str] = []
    for line in answer.splitlines():
        index, name, share = ([word.strip() for word in line.split(",")] + ["", "", ""])[:3]
        ours = any(word == index or (word.startswith("GPU-") and name.startswith(word)) for word in _seen(count))
        if ours and share.isdecimal() and float(share) > BUSY_PERCENT:
            busy.append(f"GPU {index} {share} %")
    return f"other programs keep busy: {', '.join(busy)}" if busy else ""


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
