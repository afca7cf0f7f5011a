"""The comparison: every framework with every case, each in a child of its own, timed in turn, written after each row."""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from convoy.compare.case import Case
from convoy.compare.case_input_folders import CaseInputFolders
from convoy.compare.child_processes import ChildProcesses
from convoy.compare.child_session import ChildFailedError, ChildSession
from convoy.compare.frameworks import Entry
from convoy.compare.interleaved_timing import Samples, quietest, take_rounds
from convoy.compare.limits import ROUNDS, Limits
from convoy.compare.progress import RunProgress
from convoy.compare.ready_frameworks import ReadyFrameworks
from convoy.compare.runs.device_lock import claim, noted
from convoy.compare.runs.manifest import ask_gpu, gpu_clocks, make_manifest
from convoy.compare.runs.rows import Figure, Row
from convoy.compare.runs.runfile import Run, resumed, write
from convoy.compare.samples import ready_row, rounds_for, row_of, with_samples
from convoy.measurement import detect_target
from convoy.target import Target

ALONE_ROUNDS: Final = 5
"""Rounds of a framework alone, as soon as it is ready: the file has these figures if the run is interrupted."""

LATE_SHARE: Final = 0.8
"""A case is begun while there is time for this share of the longest one so far."""

PROTOCOL: Final = (
    f"each framework in its own process; outputs checked first; {ROUNDS} interleaved rounds of at least 20 ms, the order drawn "
    "anew in each; median, 20th and 80th percentile over rounds; rounds that were slow for all are dropped; noisy ones are "
    "taken again"
)

Observer = Callable[[str, int, int], None]
"""Called with the current activity, the number done, and the total."""


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
        self._waiting = ReadyFrameworks(self.limits, self._children, self._progress)

    @property
    def run(self) -> Run:
        """The run as it stands."""
        return self._progress.run

    def __enter__(self) -> Self:
        self._root = Path(tempfile.mkdtemp(prefix="convoy-compare-"))
        self._pool = ThreadPoolExecutor(self.limits.builders(self.target.device) + 1)
        self._material = CaseInputFolders(
            self._root, self._pool, self._children, lambda case: self.observer(f"{case.label()}: exact results", 0, 0)
        )
        return self

    def __exit__(self, *error: object) -> None:
        """End every child, so that the threads that talk with them end too."""
        self._progress.close()
        self._children.end_all()
        self._pool.shutdown(cancel_futures=True)
        self._waiting.release()
        shutil.rmtree(self._root, ignore_errors=True)

    def run_cases(self, cases: Sequence[Case], entries: Sequence[Entry]) -> None:
        """All cases for which there is time; on a GPU the next one's exact results are made while frameworks are built."""
        waiting = [
            case
            for case in cases
            if self._progress.missing(case, entries) or self._progress.timed_alone(case, entries, self._waiting.alive)
        ]
        # Frameworks that were never tried go first: one that failed may take its whole time limit again.
        waiting.sort(key=lambda case: all(self._progress.row(case, entry.id) is not None for entry in entries))
        longest = 0.0
        for index, case in enumerate(waiting):
            start = time.monotonic()
            if start + LATE_SHARE * longest > self._deadline:
                self.left += [late.label() for late in waiting[index:]]
                break
            ahead = waiting[index + 1 : index + 2] if self.target.device == "cuda" else []
            self.run_case(case, entries, ahead)
            longest = max(longest, time.monotonic() - start)
        if self.left:
            self.observer(f"no time was left for {', '.join(self.left)}: the same command goes on from here", 0, 0)

    def run_case(self, case: Case, entries: Sequence[Entry], ahead: Sequence[Case] = ()) -> None:
        """All frameworks with one case; those that have a row already are run again to be timed in turn with new ones.

        Args:
            case: net and setting.
            entries: frameworks.
            ahead: cases whose exact results are made meanwhile.
        """
        missing = {entry: entry.absence(case.device) for entry in self._progress.missing(case, entries)}
        absent = [row_of(case, entry.id, "absent", why) for entry, why in missing.items() if why]
        present = [entry for entry, why in missing.items() if not why]
        apart = self._progress.timed_alone(case, entries, self._waiting.alive)
        folder: Path | None = None
        try:
            if present or apart:
                folder = self._material.folder(case)  # before any row, for the model itself may be none
        except ChildFailedError as error:
            for entry in present:
                self._fail(case, entry, error, "the reference run failed: ")
        for row in absent:
            self._progress.keep(row)
        if folder is None:
            return
        made = [self._material.begin(later) for later in ahead]
        try:
            self._prepare_all(case, present, folder)
            if self._waiting.alive or apart:
                self._prepare_all(case, self._progress.timeable_together(case, entries, self._waiting.alive), folder)
            for future in made:
                future.exception()  # nothing else may run while frameworks are timed
            self.observer(f"{case.label()}: in turn", len(present), len(present) + 1)
            self._measure_in_turn(case)
        finally:
            self._waiting.release()
            shutil.rmtree(folder, ignore_errors=True)

    def _prepare_all(self, case: Case, entries: Sequence[Entry], folder: Path) -> None:
        """Prepare frameworks, several at once where that is allowed; the first exception ends them all."""
        jobs = self.limits.builders(case.device)
        room = threading.Semaphore(jobs)

        def one(index: int, entry: Entry) -> None:
            with room:
                self.observer(f"{case.label()}: {entry.id}", index, len(entries) + 1)
                self._measure_alone(case, entry, folder)

        if jobs == 1:
            for index, entry in enumerate(entries):
                one(index, entry)
            return
        for future in [self._pool.submit(one, index, entry) for index, entry in enumerate(entries)]:
            future.result()

    # --- one framework ------------------------------------------------------------------------------------------------

    def _measure_alone(self, case: Case, entry: Entry, folder: Path) -> None:
        """Prepare one framework, time it by itself, and leave it alive for its turn."""
        export_s = self._exported(case, entry, folder)
        if export_s is None:
            return
        try:
            child, row = self._prepare(case, entry, folder)
        except ChildFailedError as error:
            if error.status != "out_of_memory" or not self._waiting.alive:
                self._fail(case, entry, error)
                return
            self._waiting.release(case)  # the others that wait for their turn may be to blame
            try:
                child, row = self._prepare(case, entry, folder)
            except ChildFailedError as second:
                self._fail(case, entry, second)
                return
        if export_s:
            row = dataclasses.replace(row, figures=(*row.figures, Figure.once("export_s", "s", export_s)))
        known = self._progress.finished_row(case, entry.id)
        if known is None or known.setting != row.setting:
            self._progress.keep(row)  # else its compile time stands: this time a database or a cache may have helped
        self._waiting.add(entry.id, child)
        if self._waiting.exceeds_memory_share(self.target.device):
            self._waiting.release(case)

    def _fail(self, case: Case, entry: Entry, error: ChildFailedError, where: str = "") -> None:
        """A row that says how it failed; none where only the time was up, for that is nobody's failure."""
        if time.monotonic() < self._deadline:
            self._lose(case, entry.id, error, where)
        else:
            self.left.append(f"{case.label()} in {entry.id}")

    def _lose(self, case: Case, name: str, error: ChildFailedError, where: str = "") -> None:
        """A row that says how it failed, unless it worked before and only should have been timed beside new ones."""
        if self._progress.finished_row(case, name) is None:
            self._progress.keep(row_of(case, name, error.status, where + error.reason))
        else:
            reason = f"{error.status}: {where}{error.reason}"
            self.observer(f"{case.label()}: {name} keeps its figures and was not timed in turn: {reason}", 0, 0)

    def _exported(self, case: Case, entry: Entry, folder: Path) -> float | None:
        """Seconds that the ONNX export took; 0 where none was needed or was there; None where it failed: that is a row."""
        if not entry.onnx or case.training:
            return 0.0
        try:
            return self._material.export_s(case, folder)
        except ChildFailedError as error:
            self._fail(case, entry, error, "torch.onnx.export: ")
            return None

    def _prepare(self, case: Case, entry: Entry, folder: Path) -> tuple[ChildSession, Row]:
        child = self._children.start(case, folder, {"role": "framework", "entry": dataclasses.asdict(entry)}, entry.id)
        try:
            ready = child.wait_for("ready")
            with child.turn():
                rounds = rounds_for(ready["call_s"], min(ALONE_ROUNDS, self.limits.rounds))
                samples = child.ask({"do": "sample", "rounds": rounds}, "samples")
                request = {"do": "finish", "bus_id": self._bus_id, "kinds": self.limits.profile}
                finished = child.ask(request, "finished")
        except BaseException:  # everything, an interrupt too: the child must not outlive this call
            self._children.end(child)
            raise
        return child, ready_row(case, entry.id, child.startup_s, ready, samples, finished)

    @cached_property
    def _bus_id(self) -> str:
        """The PCI bus id of the GPU that children use, as nvidia-smi has it; empty on a CPU or where there is no nvidia-smi."""
        return "".join(ask_gpu("pci.bus_id")) if self.target.device == "cuda" else ""

    # --- all in turn ----------------------------------------------------------------------------------------------------

    def _measure_in_turn(self, case: Case) -> None:
        """Interleaved rounds of all that are alive; noisy ones are taken again."""
        if not self._waiting.alive:
            return
        for child in self._waiting.alive.values():
            child.deadline = math.inf  # a case that is nearly done is worth its last seconds
        best = quietest(lambda: self._rounds(case))
        for name, samples in best.items():
            row = self._progress.row(case, name)
            in_turn = len(best) > 1
            if row is not None and row.ok and (in_turn or row.detail.get("timed") != "in turn"):
                self._progress.keep(with_samples(row, samples, in_turn=in_turn))

    def _rounds(self, case: Case) -> dict[str, Samples]:
        """Rounds of those that are still alive; one that fails is ended, and its row says how."""

        def failed(name: str, error: ChildFailedError) -> None:
            self._children.end(self._waiting.alive.pop(name))
            self._lose(case, name, error)

        slowest = max((self._progress.call_s(case, name) for name in self._waiting.alive), default=0.0)
        return take_rounds(self._waiting.alive, rounds_for(slowest, self.limits.rounds), failed)
