"""The comparison: every framework with every case, each in a child of its own, timed in turn, written after each row."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from convoy.compare.case import Case
from convoy.compare.frameworks import Entry
from convoy.compare.lock import device_lock, others_at_work
from convoy.compare.manifest import ask_gpu, make_manifest
from convoy.compare.memory import available_bytes
from convoy.compare.runfile import Figure, Row, Run, resumed, write
from convoy.compare.samples import NOISY, ready_row, relative_spread, rounds_for, row_of, settled, with_samples
from convoy.compare.session import ChildFailedError, ChildSession
from convoy.measurement import detect_target
from convoy.measurement.statistics import disturbed_rounds
from convoy.target import Target

ROUNDS: Final = 15
"""Interleaved rounds: an odd number, so that the median is a sample."""

ALONE_ROUNDS: Final = 5
"""Rounds of a framework by itself, as soon as it is ready: what stands in the file when the run is interrupted."""

MOST_REPEATS: Final = 2
"""How often noisy rounds are taken again."""

REPEATS_S: Final = 60.0
"""When rounds have taken this long they are not taken again: on a machine that is busy all the time they would be no quieter."""

ALIVE_SHARE: Final = {"cpu": 0.5, "cuda": 0.8}
"""Share of the memory that frameworks which wait for their turn may have together; beyond it the earlier ones are ended, and
their figures stay those that they got alone. A GPU's next framework that finds too little left is begun again without them."""

CORES_A_FRAMEWORK: Final = 3
"""Cores for each framework that is built beside others on a GPU: compilers use several."""

LATE_SHARE: Final = 0.8
"""A case is begun while there is time for this share of the longest one so far."""

MEMORY_SHARE: Final = 0.9
"""Share of the memory that is available at the start that one framework may use, unless a limit is given."""

PROTOCOL: Final = (
    f"each framework in its own process; outputs checked first; {ROUNDS} interleaved rounds (A B C A B C ...) of at least 20 ms; "
    "median, 20th and 80th percentile over rounds; rounds that were slow for all are dropped; noisy ones are taken again"
)

Observer = Callable[[str, int, int], None]
"""Told what is being done, how much is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a framework may use.

    Attributes:
        timeout_s: most seconds for each of its steps (start, one way built and checked, one round).
        memory_bytes: most resident bytes; 0: `MEMORY_SHARE` of what is available.
        rounds: interleaved rounds.
        seconds: when they are over nothing new is begun; 0: there is time.
        jobs: frameworks that are built side by side; 0: one on a CPU, on a GPU as many as the cores are good for.
    """

    timeout_s: float = 900.0
    memory_bytes: int = 0
    rounds: int = ROUNDS
    seconds: float = 0.0
    jobs: int = 0

    def builders(self, device: str) -> int:
        """How many frameworks are built side by side."""
        return self.jobs or (max(1, (os.cpu_count() or 1) // CORES_A_FRAMEWORK) if device == "cuda" else 1)


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
        found["TORCHINDUCTOR_CACHE_DIR"] = str(
            folder / "inductor"
        )  # or the second run's compile time would be another's
    return found


def compare(
    cases: Sequence[Case],
    entries: Sequence[Entry],
    path: Path,
    *,
    request: Mapping[str, Any],
    limits: Limits = Limits(),
    again: bool = False,
    observer: Observer = lambda _what, _done, _all: None,
) -> Run:
    """Run every case in every framework; `path` is written after each row, and an interrupted run goes on from there.

    Args:
        cases: what to run.
        entries: in what.
        path: the run file.
        request: what was asked for, for the manifest.
        limits: what a framework may use.
        again: measure anew although rows are there.
        observer: told about progress and warnings.

    Returns:
        The run, as it stands in the file.

    Raises:
        InputError: a model, weights or size that cannot be used, or a file of another run.
    """
    target = detect_target(cases[0].device)
    with device_lock(target) as warning:
        notes = [note for note in (warning, others_at_work(target)) if note]
        fresh = Run("compare", make_manifest(device=target.device, protocol=PROTOCOL, request=request, notes=notes))
        for note in notes:
            observer(f"warning: {note}", 0, 0)
        comparison = Comparison(resumed(path, fresh, again=again), path, target, limits, observer)
        with comparison:
            comparison.run_cases(cases, entries)
        return comparison.run


class Comparison:
    """A run that is being made."""

    def __init__(self, run: Run, path: Path, target: Target, limits: Limits, observer: Observer) -> None:
        self.run, self.path, self.target, self.observer = run, path, target, observer
        memory = limits.memory_bytes or int(available_bytes() * MEMORY_SHARE)
        self.limits = dataclasses.replace(limits, memory_bytes=memory)
        self.left: list[str] = []
        """Cases for which no time was left."""
        self._deadline = time.monotonic() + limits.seconds if limits.seconds else math.inf
        self._turns = threading.Lock()
        """Held by the child that has the device for itself."""
        self._state = threading.RLock()
        """Of everything below and of the run: frameworks are prepared by threads."""
        self._alive: dict[str, ChildSession] = {}
        self._children: set[ChildSession] = set()
        self._ending = False
        self._folders: dict[Case, Future[Path]] = {}
        self._exporting = threading.Lock()

    def __enter__(self) -> Self:
        self._root = Path(tempfile.mkdtemp(prefix="convoy-compare-"))
        self._pool = ThreadPoolExecutor(self.limits.builders(self.target.device) + 1)
        return self

    def __exit__(self, *error: object) -> None:
        """End every child, so that the threads that talk with them end too."""
        with self._state:
            self._ending = True
            for child in self._children:
                child.kill()
        self._pool.shutdown(cancel_futures=True)
        self._release(settle=False)
        shutil.rmtree(self._root, ignore_errors=True)

    def run_cases(self, cases: Sequence[Case], entries: Sequence[Entry]) -> None:
        """All cases for which there is time; on a GPU the next one's exact results are made while frameworks are built."""
        waiting = [case for case in cases if self._missing(case, entries)]
        longest = 0.0
        for index, case in enumerate(waiting):
            start = time.monotonic()
            if start + LATE_SHARE * longest > self._deadline:
                self.left += [_words(late) for late in waiting[index:]]
                break
            ahead = waiting[index + 1 : index + 2] if self.target.device == "cuda" else []
            self.run_case(case, entries, ahead)
            longest = max(longest, time.monotonic() - start)
        if self.left:
            self.observer(f"no time was left for {', '.join(self.left)}: the same command goes on from here", 0, 0)

    def run_case(self, case: Case, entries: Sequence[Entry], ahead: Sequence[Case] = ()) -> None:
        """All frameworks with one case; those that have a row already are not run again.

        Args:
            case: what is run.
            entries: in what.
            ahead: cases whose exact results are made meanwhile.
        """
        present: list[Entry] = []
        for entry in self._missing(case, entries):
            absence = entry.absence(case.device)
            if absence:
                self._keep(row_of(case, entry.id, "absent", absence))
            else:
                present.append(entry)
        if not present:
            return
        try:
            if case in self._folders and self._folders[case].exception() is not None:
                del self._folders[case]  # made beside others it may have lacked memory that there is now
            folder = self._material(case).result()
        except ChildFailedError as error:
            for entry in present:
                self._fail(case, entry, error, "the reference run failed: ")
            return
        made = [self._material(later) for later in ahead]
        try:
            self._prepare_all(case, present, folder)
            for future in made:
                future.exception()  # nothing else may run while frameworks are timed
            self.observer(f"{_words(case)}: in turn", len(present), len(present) + 1)
            self._measure_in_turn(case)
        finally:
            self._release(settle=False)
            shutil.rmtree(folder, ignore_errors=True)

    def _missing(self, case: Case, entries: Sequence[Entry]) -> list[Entry]:
        """Frameworks without a row, or with one that was not finished."""
        rows = {entry.id: self.run.row(row_of(case, entry.id, "ok").key) for entry in entries}
        return [entry for entry in entries if (row := rows[entry.id]) is None or row.detail.get("provisional")]

    def _prepare_all(self, case: Case, entries: Sequence[Entry], folder: Path) -> None:
        """Prepare frameworks, several at once where that is allowed; the first exception ends them all."""
        jobs = self.limits.builders(case.device)
        room = threading.Semaphore(jobs)

        def one(index: int, entry: Entry) -> None:
            with room:
                self.observer(f"{_words(case)}: {entry.id}", index, len(entries) + 1)
                self._measure_alone(case, entry, folder)

        if jobs == 1:
            for index, entry in enumerate(entries):
                one(index, entry)
            return
        for future in [self._pool.submit(one, index, entry) for index, entry in enumerate(entries)]:
            future.result()

    # --- one framework ------------------------------------------------------------------------------------------------

    def _material(self, case: Case) -> Future[Path]:
        """The folder with what a case's frameworks are given, made or being made."""
        if case not in self._folders:
            self._folders[case] = self._pool.submit(self._make_material, case, self._root / str(len(self._folders)))
        return self._folders[case]

    def _make_material(self, case: Case, folder: Path) -> Path:
        self.observer(f"{_words(case)}: exact results", 0, 0)
        folder.mkdir()
        with self._child(case, folder, {"role": "material"}) as child:
            child.wait_for("material")
        return folder

    def _measure_alone(self, case: Case, entry: Entry, folder: Path) -> None:
        """Prepare one framework, time it by itself, and leave it alive for its turn."""
        export_s = self._exported(case, entry, folder)
        if export_s is None:
            return
        try:
            child, row = self._prepare(case, entry, folder)
        except ChildFailedError as error:
            if error.status != "out_of_memory" or not self._alive:
                self._fail(case, entry, error)
                return
            self._release()  # the others that wait for their turn may be to blame
            try:
                child, row = self._prepare(case, entry, folder)
            except ChildFailedError as second:
                self._fail(case, entry, second)
                return
        if export_s:
            row = dataclasses.replace(row, figures=(*row.figures, Figure.once("export_s", "s", export_s)))
        self._keep(row)
        with self._state:
            self._alive[entry.id] = child
        if self._crowded():
            self._release()

    def _fail(self, case: Case, entry: Entry, error: ChildFailedError, where: str = "") -> None:
        """A row that says how it failed; none where only the time was up, for that is nobody's failure."""
        if time.monotonic() < self._deadline:
            self._keep(row_of(case, entry.id, error.status, where + error.reason))
        else:
            self.left.append(f"{_words(case)} in {entry.id}")

    def _exported(self, case: Case, entry: Entry, folder: Path) -> float | None:
        """Seconds that the ONNX export took; 0 where none was needed or was there; None where it failed: that is a row."""
        if not entry.onnx or case.training:
            return 0.0
        with self._exporting:
            if (folder / "model.onnx").exists():
                return 0.0
            try:
                with self._child(case, folder, {"role": "export"}) as child:
                    return float(child.wait_for("exported"))
            except ChildFailedError as error:
                self._fail(case, entry, error, "torch.onnx.export: ")
                return None

    def _prepare(self, case: Case, entry: Entry, folder: Path) -> tuple[ChildSession, Row]:
        child = self._start(case, folder, {"role": "framework", "entry": dataclasses.asdict(entry)}, entry.id)
        try:
            ready = child.wait_for("ready")
            with child.turn():
                rounds = rounds_for(ready["call_s"], min(ALONE_ROUNDS, self.limits.rounds))
                samples = child.ask({"do": "sample", "rounds": rounds}, "samples")
                finished = child.ask({"do": "finish", "bus_id": self._bus_id}, "finished")
        except BaseException:
            self._end(child)
            raise
        return child, ready_row(case, entry.id, child.startup_s, ready, samples, finished)

    # --- all in turn ----------------------------------------------------------------------------------------------------

    def _measure_in_turn(self, case: Case) -> None:
        """Interleaved rounds of all that are alive; noisy ones are taken again."""
        if not self._alive:
            return
        for child in self._alive.values():
            child.deadline = math.inf  # a case that is nearly done is worth its last seconds
        best: dict[str, dict[str, list[float]]] = {}
        start = time.monotonic()
        for _ in range(MOST_REPEATS + 1):
            for name, samples in self._rounds(case).items():
                if name not in best or relative_spread(samples) < relative_spread(best[name]):
                    best[name] = samples
            quiet = all(relative_spread(samples) <= NOISY for samples in best.values())
            if quiet or time.monotonic() - start > REPEATS_S:
                break
        for name, samples in best.items():
            row = self.run.row(row_of(case, name, "ok").key)
            if row is not None and row.ok:
                self._keep(with_samples(row, samples, in_turn=len(best) > 1))

    def _rounds(self, case: Case) -> dict[str, dict[str, list[float]]]:
        found: dict[str, dict[str, list[float]]] = {name: {} for name in self._alive}
        calls = {name: self._call_s(case, name) for name in self._alive}
        for _ in range(rounds_for(max(calls.values()), self.limits.rounds)):
            for name, child in list(self._alive.items()):
                try:
                    samples = child.ask({"do": "sample", "rounds": 1}, "samples")
                except ChildFailedError as error:
                    self._end(self._alive.pop(name))
                    found.pop(name)
                    self._keep(row_of(case, name, error.status, error.reason))
                    continue
                for metric, values in samples.items():
                    found[name].setdefault(metric, []).extend(values)
        dropped = disturbed_rounds({name: samples["latency_ms"] for name, samples in found.items()})
        return {
            name: {metric: [v for i, v in enumerate(values) if i not in dropped] for metric, values in samples.items()}
            for name, samples in found.items()
        }

    def _call_s(self, case: Case, name: str) -> float:
        row = self.run.row(row_of(case, name, "ok").key)
        latency = row.figure("latency_ms") if row else None
        return latency.p50 / 1e3 if latency else 0.0

    # --- children -------------------------------------------------------------------------------------------------------

    def _start(self, case: Case, folder: Path, hello: Mapping[str, Any], name: str = "") -> ChildSession:
        child = ChildSession(
            {"case": case.to_dict(), "folder": str(folder), **hello},
            environment(case, name, folder),
            timeout_s=self.limits.timeout_s,
            memory_limit_bytes=self.limits.memory_bytes,
            turns=self._turns,
            deadline=self._deadline,
        )
        with self._state:
            self._children.add(child)
            if self._ending:
                child.kill()
        return child

    def _end(self, child: ChildSession) -> None:
        with self._state:
            self._children.discard(child)
        child.end()

    @contextmanager
    def _child(self, case: Case, folder: Path, hello: Mapping[str, Any]) -> Iterator[ChildSession]:
        child = self._start(case, folder, hello)
        try:
            yield child
        finally:
            self._end(child)

    @cached_property
    def _bus_id(self) -> str:
        """The PCI bus id of the GPU that children use, as nvidia-smi has it; empty on a CPU or where there is no nvidia-smi."""
        return "".join(ask_gpu("pci.bus_id")) if self.target.device == "cuda" else ""

    def _crowded(self) -> bool:
        share = ALIVE_SHARE[self.target.device]
        if self.target.device == "cpu":
            used = sum(child.resident_bytes for child in self._alive.values())
            return used > share * self.limits.memory_bytes
        words = ask_gpu("memory.used", "memory.total", units=False)
        return bool(words) and float(words[0]) > share * float(words[1])

    def _release(self, *, settle: bool = True) -> None:
        """End those that wait; with `settle` what they got alone is what there is, for memory is short."""
        with self._state:
            ended, self._alive = self._alive, {}
            for child in ended.values():
                self._end(child)
            for row in self.run.rows if settle else ():
                if row.provider in ended and row.detail.get("provisional"):
                    self._keep(dataclasses.replace(row, detail=settled(row.detail)))

    def _keep(self, row: Row) -> None:
        with self._state:
            if not self._ending:
                self.run = self.run.with_row(row)
                write(self.run, self.path)


def _words(case: Case) -> str:
    return f"{case.model} batch {case.batch} {case.mode}"
