"""RunProgress: the finished rows of a comparison, written to its file one by one, and the work that is left."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from convoy.compare.case import Case
from convoy.compare.frameworks import Entry
from convoy.compare.runs.rows import Row
from convoy.compare.runs.runfile import Run, write
from convoy.compare.samples import row_of

SHORT: Final = "short_of_memory"
"""In a row's detail: it was ended before its turn because memory was short; that it was timed alone is the last word on it."""


class RunProgress:
    """The rows of a run, kept by several threads.

    Args:
        run: with the rows that are there already.
        path: the run file.
    """

    def __init__(self, run: Run, path: Path) -> None:
        self.run, self.path = run, path
        self._lock = threading.Lock()
        self._closed = False

    def keep(self, row: Row) -> None:
        """Take a row into the run and its file."""
        with self._lock:
            if not self._closed:
                self.run = self.run.with_row(row)
                write(self.run, self.path)

    def close(self) -> None:
        """Record nothing from now on: children that are ended with the run have not failed."""
        with self._lock:
            self._closed = True

    def row(self, case: Case, name: str) -> Row | None:
        """The row of a framework, or None."""
        return self.run.row(row_of(case, name, "ok").key)

    def finished_row(self, case: Case, name: str) -> Row | None:
        """The row of a framework that has its figures: another failure, or one more build, does not take them away."""
        row = self.row(case, name)
        return row if row is not None and row.ok and not row.detail.get("provisional") else None

    def call_s(self, case: Case, name: str) -> float:
        """Seconds that a call of a framework takes; 0 where that is not known."""
        row = self.row(case, name)
        latency = row.figure("latency_ms") if row else None
        return latency.p50 / 1e3 if latency else 0.0

    def missing(self, case: Case, entries: Sequence[Entry]) -> list[Entry]:
        """Frameworks without a row, with one that was not finished, or with one whose reason may be gone."""

        def unfinished(entry: Entry) -> bool:
            row = self.row(case, entry.id)
            if row is not None and row.status == "absent":
                return row.reason != entry.absence(case.device)
            return row is None or row.passing or bool(row.detail.get("provisional"))

        return [entry for entry in entries if unfinished(entry)]

    def timeable_together(self, case: Case, entries: Sequence[Entry], waiting: Collection[str]) -> list[Entry]:
        """Frameworks that have their figures, do not wait for their turn now, and could: none that memory is too short for."""
        rows = {entry: self.finished_row(case, entry.id) for entry in entries if entry.id not in waiting}
        return [entry for entry, row in rows.items() if row is not None and not row.detail.get(SHORT)]

    def timed_alone(self, case: Case, entries: Sequence[Entry], waiting: Collection[str]) -> list[Entry]:
        """Frameworks that were timed alone although there are others to be timed in turn with."""
        able = self.timeable_together(case, entries, waiting)
        return [entry for entry in able if len(able) > 1 and self._timed(case, entry.id) == "alone"]

    def _timed(self, case: Case, name: str) -> str:
        row = self.row(case, name)
        return str(row.detail.get("timed", "")) if row is not None else ""
