"""CaseRun: one case of a comparison. Its frameworks are built, checked and timed alone, wait, and are timed in turn."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from convoy.compare.case import Case
from convoy.compare.case_input_folders import CaseInputFolders
from convoy.compare.child_processes import ChildProcesses
from convoy.compare.child_session import ChildFailedError, ChildSession
from convoy.compare.frameworks import Entry
from convoy.compare.interleaved_timing import Samples, quietest, take_rounds
from convoy.compare.limits import Limits
from convoy.compare.progress import RunProgress
from convoy.compare.ready_frameworks import ReadyFrameworks
from convoy.compare.runs.manifest import ask_gpu
from convoy.compare.runs.rows import Figure, Row
from convoy.compare.samples import ready_row, rounds_for, row_of, with_samples

ALONE_ROUNDS: Final = 5
"""Rounds of a framework alone, as soon as it is ready: the file has these figures if the run is interrupted."""

Observer = Callable[[str, int, int], None]
"""Called with the current activity, the number done, and the total."""


@dataclass(frozen=True)
class RunTools:
    """What all cases of a run share.

    Attributes:
        device: `cpu` or `cuda`.
        limits: of each framework.
        deadline: `time.monotonic()` after which nothing new is begun.
        progress: the run's rows.
        children: starts and ends processes.
        folders: each case's inputs and exact results.
        pool: threads that talk with children.
        observer: told about progress.
        left: names of what no time was left for.
    """

    device: str
    limits: Limits
    deadline: float
    progress: RunProgress
    children: ChildProcesses
    folders: CaseInputFolders
    pool: Executor
    observer: Observer
    left: list[str]

    @cached_property
    def bus_id(self) -> str:
        """The PCI bus id of the GPU that children use, as nvidia-smi has it; empty on a CPU or where there is no nvidia-smi."""
        return "".join(ask_gpu("pci.bus_id")) if self.device == "cuda" else ""


class CaseRun:
    """One case.

    Args:
        case: net and setting.
        tools: what all cases of the run share.
        beside: whether other cases are built at the same time, so that a lack of memory may be their fault.
    """

    def __init__(self, case: Case, tools: RunTools, *, beside: bool = False) -> None:
        self.case, self.tools, self.beside = case, tools, beside
        self.waiting = ReadyFrameworks(tools.limits, tools.children, tools.progress)
        self.lacked_memory = False
        """Whether a framework lacked memory beside other cases, and has no row because of it."""

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Build, check and time alone; those that have a row already are built again to be timed in turn with new ones."""
        case, progress = self.case, self.tools.progress
        missing = {entry: entry.absence(case.device) for entry in progress.missing(case, entries)}
        absent = [row_of(case, entry.id, "absent", why) for entry, why in missing.items() if why]
        present = [entry for entry, why in missing.items() if not why]
        apart = progress.timed_alone(case, entries, self.waiting.alive)
        folder: Path | None = None
        try:
            if present or apart:
                folder = self.tools.folders.folder(case)  # before any row, for the model itself may be none
        except ChildFailedError as error:
            for entry in present:
                self._fail(entry, error, "the reference run failed: ")
        for row in absent:
            progress.keep(row)
        if folder is None:
            return
        self._prepare_all(present, folder)
        if self.waiting.alive or apart:
            self._prepare_all(progress.timeable_together(case, entries, self.waiting.alive), folder)

    def _prepare_all(self, entries: Sequence[Entry], folder: Path) -> None:
        """Prepare frameworks, several at once where that is allowed; the first exception ends them all."""
        jobs = self.tools.limits.builders(self.case.device)
        room = threading.Semaphore(jobs)

        def one(index: int, entry: Entry) -> None:
            with room:
                self.tools.observer(f"{self.case.label()}: {entry.id}", index, len(entries) + 1)
                self._measure_alone(entry, folder)

        if jobs == 1:
            for index, entry in enumerate(entries):
                one(index, entry)
            return
        for future in [self.tools.pool.submit(one, index, entry) for index, entry in enumerate(entries)]:
            future.result()

    def _measure_alone(self, entry: Entry, folder: Path) -> None:
        """Prepare one framework, time it by itself, and leave it alive for its turn."""
        export_s = self._exported(entry, folder)
        if export_s is None:
            return
        try:
            child, row = self._prepare(entry, folder)
        except ChildFailedError as error:
            if error.status != "out_of_memory" or self.beside or not self.waiting.alive:
                self._fail(entry, error)
                return
            self.waiting.release(self.case)  # the others that wait for their turn may be to blame
            try:
                child, row = self._prepare(entry, folder)
            except ChildFailedError as second:
                self._fail(entry, second)
                return
        if export_s:
            row = dataclasses.replace(row, figures=(*row.figures, Figure.once("export_s", "s", export_s)))
        known = self.tools.progress.finished_row(self.case, entry.id)
        # Else its compile time stands: this time a database or a cache may have helped.
        if known is None or known.setting != row.setting:
            self.tools.progress.keep(row)
        self.waiting.add(entry.id, child)
        if self.waiting.exceeds_memory_share(self.tools.device):
            self.lacked_memory = self.beside
            self.waiting.release(None if self.beside else self.case)

    def _fail(self, entry: Entry, error: ChildFailedError, where: str = "") -> None:
        """A row that says how it failed; none where the time was up or other cases took the memory: that is nobody's failure."""
        if self.beside and error.status == "out_of_memory":
            self.lacked_memory = True
        elif time.monotonic() < self.tools.deadline:
            self._lose(entry.id, error, where)
        else:
            self.tools.left.append(f"{self.case.label()} in {entry.id}")

    def _lose(self, name: str, error: ChildFailedError, where: str = "") -> None:
        """A row that says how it failed, unless it worked before and only should have been timed beside new ones."""
        if self.tools.progress.finished_row(self.case, name) is None:
            self.tools.progress.keep(row_of(self.case, name, error.status, where + error.reason))
        else:
            reason = f"{error.status}: {where}{error.reason}"
            self.tools.observer(
                f"{self.case.label()}: {name} keeps its figures and was not timed in turn: {reason}", 0, 0
            )

    def _exported(self, entry: Entry, folder: Path) -> float | None:
        """Seconds that the ONNX export took; 0 where none was needed or was there; None where it failed: that is a row."""
        if not entry.onnx or self.case.training:
            return 0.0
        try:
            return self.tools.folders.export_s(self.case, folder)
        except ChildFailedError as error:
            self._fail(entry, error, "torch.onnx.export: ")
            return None

    def _prepare(self, entry: Entry, folder: Path) -> tuple[ChildSession, Row]:
        child = self.tools.children.start(
            self.case, folder, {"role": "framework", "entry": dataclasses.asdict(entry)}, entry.id
        )
        try:
            ready = child.wait_for("ready")
            with child.turn():
                rounds = rounds_for(ready["call_s"], min(ALONE_ROUNDS, self.tools.limits.rounds))
                samples = child.ask({"do": "sample", "rounds": rounds}, "samples")
                request = {"do": "finish", "bus_id": self.tools.bus_id, "kinds": self.tools.limits.profile}
                finished = child.ask(request, "finished")
        except BaseException:  # everything, an interrupt too: the child must not outlive this call
            self.tools.children.end(child)
            raise
        return child, ready_row(self.case, entry.id, child.startup_s, ready, samples, finished)

    def time_in_turn(self) -> None:
        """Interleaved rounds of all that are alive; noisy ones are taken again."""
        if not self.waiting.alive:
            return
        for child in self.waiting.alive.values():
            child.deadline = math.inf  # a case that is nearly done is worth its last seconds
        best = quietest(self._rounds)
        for name, samples in best.items():
            row = self.tools.progress.row(self.case, name)
            in_turn = len(best) > 1
            if row is not None and row.ok and (in_turn or row.detail.get("timed") != "in turn"):
                self.tools.progress.keep(with_samples(row, samples, in_turn=in_turn))

    def _rounds(self) -> dict[str, Samples]:
        """Rounds of those that are still alive; one that fails is ended, and its row says how."""

        def failed(name: str, error: ChildFailedError) -> None:
            self.tools.children.end(self.waiting.alive.pop(name))
            self._lose(name, error)

        slowest = max((self.tools.progress.call_s(self.case, name) for name in self.waiting.alive), default=0.0)
        return take_rounds(self.waiting.alive, rounds_for(slowest, self.tools.limits.rounds), failed)
