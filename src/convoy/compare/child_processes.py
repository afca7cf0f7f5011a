"""The child processes of a comparison: begun from several threads, one at a time on the clock, ended all at once."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convoy.compare.case import Case
from convoy.compare.child_session import ChildSession
from convoy.compare.limits import Limits


def environment(case: Case, entry_id: str, folder: Path) -> dict[str, str]:
    """Variables that frameworks read when they are imported."""
    threads = str(case.threads)
    found = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # or it takes all of the GPU's memory at once, as JAX does
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "KERAS_BACKEND": "tensorflow",
    }
    if case.device == "cpu":
        found |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if entry_id == "inductor":
        # Or the second run's compile time would be another's.
        found["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    return found


class ChildProcesses:
    """The children of a run.

    Args:
        limits: time and memory of each.
        deadline: `time.monotonic()` after which none is waited for.
    """

    def __init__(self, limits: Limits, deadline: float) -> None:
        self._limits, self._deadline = limits, deadline
        self._turns = threading.Lock()
        """Held by the child that has the device for itself."""
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._alive: set[ChildSession] = set()
        self.ended = False
        """Whether all were ended: no new one lives."""

    def start(self, case: Case, folder: Path, hello: Mapping[str, Any], name: str = "") -> ChildSession:
        """A child that is greeted with its case and folder.

        Args:
            case: net and setting.
            folder: with its inputs.
            hello: the rest of its first message: its role.
            name: the framework's, where it is one.
        """
        child = ChildSession(
            {"case": case.to_dict(), "folder": str(folder), **hello},
            environment(case, name, folder),
            timeout_s=self._limits.timeout_s,
            memory_limit_bytes=self._limits.memory_bytes,
            turns=self._turns,
            deadline=self._deadline,
        )
        with self._lock:
            self._alive.add(child)
            if self.ended:
                child.kill()
        return child

    def end(self, child: ChildSession) -> None:
        """End one, by the thread that talks with it."""
        with self._lock:
            self._alive.discard(child)
        child.end()

    @contextmanager
    def one(self, case: Case, folder: Path, hello: Mapping[str, Any]) -> Generator[ChildSession]:
        """A child that is ended afterwards."""
        child = self.start(case, folder, hello)
        try:
            yield child
        finally:
            self.end(child)

    def end_all(self) -> None:
        """Kill every child, so that the threads that talk with them end too."""
        with self._lock:
            self.ended = True
            for child in self._alive:
                child.kill()
