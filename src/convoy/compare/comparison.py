"""The comparison: every framework with every case, each in a child of its own, timed in turn, written after each row."""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self

from convoy.compare.case import Case
from convoy.compare.case_input_folders import CaseInputFolders
from convoy.compare.case_run import CaseRun, Observer, RunTools
from convoy.compare.child_processes import ChildProcesses
from convoy.compare.frameworks import Entry
from convoy.compare.limits import ROUNDS, Limits
from convoy.compare.progress import RunProgress
from convoy.compare.runs.device_lock import claim, noted
from convoy.compare.runs.manifest import gpu_clocks, make_manifest
from convoy.compare.runs.runfile import Run, resumed, write
from convoy.measurement import detect_target
from convoy.target import Target

LATE_SHARE: Final = 0.8
"""A case is begun while there is time for this share of the longest one so far."""

PROTOCOL: Final = (
    f"each framework in its own process; outputs checked first; {ROUNDS} interleaved rounds of at least 20 ms, the order drawn "
    "anew in each; median, 20th and 80th percentile over rounds; rounds that were slow for all are dropped; noisy ones are "
    "taken again"
)


def compare(
    cases: Sequence[Case],
    entries: Sequence[Entry],
    path: Path,
    *,
    request: Mapping[str, Any],
    limits: Limits,
    again: bool = False,
    observer: Observer = lambda _what, _done, _all: None,
) -> Run:
    """Run every case in every framework; `path` is written after each row, and an interrupted run goes on from there.

    Args:
        cases: to run.
        entries: frameworks.
        path: the run file.
        request: the command and its options, for the manifest.
        limits: of each framework.
        again: measure anew although rows are there.
        observer: told about progress and warnings.

    Returns:
        The run, as it stands in the file.

    Raises:
        InputError: a model, weights or size that cannot be used, or a file of another run.
    """
    target = detect_target(cases[0].device)
    with claim(target, lambda warning: observer(warning, 0, 0)) as notes:
        fresh = Run("compare", make_manifest(device=target.device, protocol=PROTOCOL, request=request, notes=notes))
        comparison = Comparison(resumed(path, fresh, again=again), path, target, limits, observer)
        with comparison:
            comparison.run_cases(cases, entries)
        notes.look()
        run = noted(comparison.run, notes)
        if target.device == "cuda":
            run = dataclasses.replace(run, manifest={**run.manifest, "clocks_after": gpu_clocks()})
        write(run, path)
        return run


class Comparison:
    """A run that is being made."""

    def __init__(self, run: Run, path: Path, target: Target, limits: Limits, observer: Observer) -> None:
        self.target, self.observer = target, observer
        self.limits = limits.on_this_machine()
        self.left: list[str] = []
        """Cases for which no time was left."""
        self._deadline = time.monotonic() + limits.seconds if limits.seconds else math.inf
        self._progress = RunProgress(run, path)
        self._children = ChildProcesses(self.limits, self._deadline)

    @property
    def run(self) -> Run:
        """The run as it stands."""
        return self._progress.run

    def __enter__(self) -> Self:
        self._root = Path(tempfile.mkdtemp(prefix="convoy-compare-"))
        self._pool = ThreadPoolExecutor(self.limits.builders(self.target.device) + 1)
        self._callers = ThreadPoolExecutor(self.limits.cases)
        folders = CaseInputFolders(
            self._root, self._pool, self._children, lambda case: self.observer(f"{case.label()}: exact results", 0, 0)
        )
        self._tools = RunTools(
            self.target.device, self.limits, self._deadline, self._progress, self._children, folders, self._pool,
            self.observer, self.left,
        )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        """End every child, so that the threads that talk with them end too."""
        self._progress.close()
        self._children.end_all()
        self._pool.shutdown(cancel_futures=True)
        self._callers.shutdown(cancel_futures=True)
        shutil.rmtree(self._root, ignore_errors=True)

    def run_cases(self, cases: Sequence[Case], entries: Sequence[Entry]) -> None:
        """All cases for which there is time, as many side by side as the limits say."""
        waiting = [case for case in cases if self._is_unfinished(case, entries)]
        # Frameworks that were never tried go first: one that failed may take its whole time limit again.
        waiting.sort(key=lambda case: all(self._progress.row(case, entry.id) is not None for entry in entries))
        size = self.limits.cases if self.target.device == "cuda" else 1
        longest = 0.0
        for first in range(0, len(waiting), size):
            start = time.monotonic()
            if start + LATE_SHARE * longest > self._deadline:
                self.left += [late.label() for late in waiting[first:]]
                break
            later = waiting[first + size : first + 2 * size] if self.target.device == "cuda" else []
            self.run_together(waiting[first : first + size], entries, later)
            longest = max(longest, time.monotonic() - start)
        if self.left:
            self.observer(f"no time was left for {', '.join(self.left)}: the same command goes on from here", 0, 0)

    def _is_unfinished(self, case: Case, entries: Sequence[Entry]) -> bool:
        return bool(self._progress.missing(case, entries) or self._progress.timed_alone(case, entries, ()))

    def run_together(self, cases: Sequence[Case], entries: Sequence[Entry], later: Sequence[Case] = ()) -> None:
        """Build all frameworks of some cases, then time the cases one by one while nothing else runs.

        A case that lacks memory beside the others is run again alone.

        Args:
            cases: nets and settings.
            entries: frameworks; those that have a row already are built again to be timed in turn with new ones.
            later: cases whose exact results are made meanwhile; on a GPU alone.
        """
        runs = [CaseRun(case, self._tools, beside=len(cases) > 1) for case in cases]
        try:
            prepared = [self._callers.submit(run.prepare, entries) for run in runs]
            made = [self._tools.folders.begin(case) for case in later]
            for one in prepared:
                one.result()
            for future in made:
                future.exception()  # nothing else may run while frameworks are timed
            for run in runs:
                self.observer(f"{run.case.label()}: in turn", len(entries), len(entries) + 1)
                run.time_in_turn()
                run.waiting.release()
        finally:
            for run in runs:
                run.waiting.release()
            for case in cases:
                self._tools.folders.remove(case)
        for run in runs:
            if run.lacked_memory:
                self.run_together([run.case], entries)
