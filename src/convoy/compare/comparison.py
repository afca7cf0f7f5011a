"""The comparison: every framework with every case, each in a child of its own, timed in turn, written after each row."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from convoy.compare.case import Case
from convoy.compare.frameworks import Entry
from convoy.compare.lock import device_lock, others_at_work
from convoy.compare.manifest import ask_gpu, make_manifest
from convoy.compare.memory import available_bytes
from convoy.compare.runfile import Figure, Row, Run, resumed, write
from convoy.compare.session import ChildFailedError, ChildSession
from convoy.measurement import detect_target
from convoy.measurement.statistics import disturbed_rounds
from convoy.target import Target

ROUNDS: Final = 15
"""Interleaved rounds: an odd number, so that the median is a sample."""

ALONE_ROUNDS: Final = 5
"""Rounds of a framework by itself, as soon as it is ready: what stands in the file when the run is interrupted."""

LEAST_ROUNDS: Final = 3
ROUNDS_S: Final = 30.0
"""Slow calls get fewer rounds: about this long for each framework."""

NOISY: Final = 0.10
"""A relative spread above this is noise: interleaved timings of one program on a quiet machine are within 5 %."""

MOST_REPEATS: Final = 2
"""How often noisy rounds are taken again."""

REPEATS_S: Final = 60.0
"""When rounds have taken this long they are not taken again: on a machine that is busy all the time they would be no quieter."""

ALIVE_SHARE: Final = 0.5
"""Share of the memory that frameworks which wait for their turn may have together; beyond it the earlier ones are ended, and
their figures stay those that they got alone."""

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
    """

    timeout_s: float = 900.0
    memory_bytes: int = 0
    rounds: int = ROUNDS


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
        for case in cases:
            comparison.run_case(case, entries)
        return comparison.run


class Comparison:
    """A run that is being made."""

    def __init__(self, run: Run, path: Path, target: Target, limits: Limits, observer: Observer) -> None:
        self.run, self.path, self.target, self.observer = run, path, target, observer
        memory = limits.memory_bytes or int(available_bytes() * MEMORY_SHARE)
        self.limits = dataclasses.replace(limits, memory_bytes=memory)
        self._alive: dict[str, ChildSession] = {}

    def run_case(self, case: Case, entries: Sequence[Entry]) -> None:
        """All frameworks with one case; those that have a row already are not run again."""
        missing = [entry for entry in entries if self.run.row(_row(case, entry.id, "ok").key) is None]
        present: list[Entry] = []
        for entry in missing:
            absence = entry.absence(case.device)
            if absence:
                self._keep(_row(case, entry.id, "absent", absence))
            else:
                present.append(entry)
        if not present:
            return
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="convoy-compare-")))
            stack.callback(self._release)
            try:
                self._make_material(case, folder)
            except ChildFailedError as error:
                for entry in present:
                    self._keep(_row(case, entry.id, error.status, f"the reference run failed: {error.reason}"))
                return
            for index, entry in enumerate(present):
                self.observer(f"{_words(case)}: {entry.id}", index, len(present) + 1)
                self._measure_alone(case, entry, folder)
            self.observer(f"{_words(case)}: in turn", len(present), len(present) + 1)
            self._measure_in_turn(case)

    # --- one framework ------------------------------------------------------------------------------------------------

    def _make_material(self, case: Case, folder: Path) -> None:
        self.observer(f"{_words(case)}: exact results", 0, 0)
        with self._child(case, folder, {"role": "material"}) as child:
            child.wait_for("material")

    def _measure_alone(self, case: Case, entry: Entry, folder: Path) -> None:
        """Prepare one framework, time it by itself, and leave it alive for its turn."""
        export_s = self._exported(case, entry, folder)
        if export_s is None:
            return
        try:
            child, row = self._prepare(case, entry, folder)
        except ChildFailedError as error:
            if error.status != "out_of_memory" or not self._alive:
                self._keep(_row(case, entry.id, error.status, error.reason))
                return
            self._release()  # the others that wait for their turn may be to blame
            try:
                child, row = self._prepare(case, entry, folder)
            except ChildFailedError as second:
                self._keep(_row(case, entry.id, second.status, second.reason))
                return
        if export_s:
            row = dataclasses.replace(row, figures=(*row.figures, Figure.once("export_s", "s", export_s)))
        self._keep(row)
        self._alive[entry.id] = child
        if self._crowded():
            self._release()

    def _exported(self, case: Case, entry: Entry, folder: Path) -> float | None:
        """Seconds that the ONNX export took; 0 where none was needed or was there; None where it failed: that is a row."""
        if not entry.onnx or case.training or (folder / "model.onnx").exists():
            return 0.0
        try:
            with self._child(case, folder, {"role": "export"}) as child:
                return float(child.wait_for("exported"))
        except ChildFailedError as error:
            self._keep(_row(case, entry.id, error.status, f"torch.onnx.export: {error.reason}"))
            return None

    def _prepare(self, case: Case, entry: Entry, folder: Path) -> tuple[ChildSession, Row]:
        child = self._start(case, folder, {"role": "framework", "entry": dataclasses.asdict(entry)}, entry.id)
        try:
            ready = child.wait_for("ready")
            rounds = rounds_for(ready["call_s"], min(ALONE_ROUNDS, self.limits.rounds))
            samples = child.ask({"do": "sample", "rounds": rounds}, "samples")
            finished = child.ask({"do": "finish", "bus_id": _bus_id(self.target)}, "finished")
        except BaseException:
            child.end()
            raise
        return child, ready_row(case, entry.id, child.startup_s, ready, samples, finished)

    # --- all in turn ----------------------------------------------------------------------------------------------------

    def _measure_in_turn(self, case: Case) -> None:
        """Interleaved rounds of all that are alive; noisy ones are taken again."""
        if not self._alive:
            return
        best: dict[str, dict[str, list[float]]] = {}
        start = time.monotonic()
        for _ in range(MOST_REPEATS + 1):
            for name, samples in self._rounds(case).items():
                if name not in best or _relative_spread(samples) < _relative_spread(best[name]):
                    best[name] = samples
            quiet = all(_relative_spread(samples) <= NOISY for samples in best.values())
            if quiet or time.monotonic() - start > REPEATS_S:
                break
        for name, samples in best.items():
            row = self.run.row(_row(case, name, "ok").key)
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
                    self._alive.pop(name).end()
                    found.pop(name)
                    self._keep(_row(case, name, error.status, error.reason))
                    continue
                for metric, values in samples.items():
                    found[name].setdefault(metric, []).extend(values)
        dropped = disturbed_rounds({name: samples["latency_ms"] for name, samples in found.items()})
        return {
            name: {metric: [v for i, v in enumerate(values) if i not in dropped] for metric, values in samples.items()}
            for name, samples in found.items()
        }

    def _call_s(self, case: Case, name: str) -> float:
        row = self.run.row(_row(case, name, "ok").key)
        latency = row.figure("latency_ms") if row else None
        return latency.p50 / 1e3 if latency else 0.0

    # --- children -------------------------------------------------------------------------------------------------------

    def _start(self, case: Case, folder: Path, hello: Mapping[str, Any], name: str = "") -> ChildSession:
        return ChildSession(
            {"case": case.to_dict(), "folder": str(folder), **hello},
            environment(case, name, folder),
            timeout_s=self.limits.timeout_s,
            memory_limit_bytes=self.limits.memory_bytes,
        )

    @contextmanager
    def _child(self, case: Case, folder: Path, hello: Mapping[str, Any]) -> Iterator[ChildSession]:
        child = self._start(case, folder, hello)
        try:
            yield child
        finally:
            child.end()

    def _crowded(self) -> bool:
        if self.target.device == "cpu":
            used = sum(child.resident_bytes for child in self._alive.values())
            return used > ALIVE_SHARE * self.limits.memory_bytes
        words = ask_gpu("memory.used", "memory.total", units=False)
        return bool(words) and float(words[0]) > ALIVE_SHARE * float(words[1])

    def _release(self) -> None:
        for child in self._alive.values():
            child.end()
        self._alive = {}

    def _keep(self, row: Row) -> None:
        self.run = self.run.with_row(row)
        write(self.run, self.path)


def rounds_for(call_s: float, most: int) -> int:
    """Rounds of calls that take so long: as many as are wanted, or as fit into `ROUNDS_S`, but never below `LEAST_ROUNDS`."""
    return min(most, max(LEAST_ROUNDS, int(ROUNDS_S / max(2 * call_s, 1e-6))))


def ready_row(
    case: Case,
    provider: str,
    startup_s: float,
    ready: Mapping[str, Any],
    samples: Mapping[str, list[float]],
    finished: Mapping[str, Any],
) -> Row:
    """The row of a framework that was timed by itself."""
    figures = [
        Figure.once("rel_l2_error", "1", ready["error"]),
        Figure.once("startup_s", "s", startup_s),
        Figure.once("compile_s", "s", ready["compile_s"]),
        Figure.once("peak_memory_bytes", "B", finished["peak_memory_bytes"]),
    ]
    if finished.get("energy_j"):
        figures.append(Figure.once("energy_j", "J", finished["energy_j"]))
    detail = {**ready["detail"], "ways": ready["ways"]}
    if finished.get("kinds"):
        detail["kinds"] = {name: round(ms, 6) for name, ms in finished["kinds"].items()}
    notes = [*ready["notes"], *([finished["note"]] if finished.get("note") else [])]
    row = _row(case, provider, "ok")
    row = dataclasses.replace(row, setting=ready["setting"], figures=tuple(figures), notes=tuple(notes), detail=detail)
    return with_samples(row, samples, in_turn=False)


def with_samples(row: Row, samples: Mapping[str, list[float]], *, in_turn: bool) -> Row:
    """The row with latency and throughput from these samples; whether it was timed in turn with others stands in its detail."""
    latency = figure("latency_ms", "ms", samples["latency_ms"])
    flow = figure("flow_ms", "ms", samples["flow_ms"])
    rates = [row.batch / ms * 1e3 for ms in (flow.p50, flow.p80, flow.p20)]
    timed = (latency, Figure("images_per_s", "1/s", *rates))
    kept = tuple(f for f in row.figures if f.metric not in ("latency_ms", "images_per_s"))
    detail = {**row.detail, "timed": "in turn" if in_turn else "alone", "rounds": len(samples["latency_ms"])}
    return dataclasses.replace(row, figures=(*timed, *kept), noisy=_relative_spread(samples) > NOISY, detail=detail)


def figure(metric: str, unit: str, values: Sequence[float]) -> Figure:
    """Median, 20th and 80th percentile of samples."""
    if len(values) < 2:
        return Figure.once(metric, unit, values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return Figure(metric, unit, statistics.median(values), cuts[1], cuts[7])


def _relative_spread(samples: Mapping[str, list[float]]) -> float:
    found = figure("latency_ms", "ms", samples["latency_ms"])
    return found.spread / found.p50 if found.p50 else 0.0


def _row(case: Case, provider: str, status: str, reason: str = "") -> Row:
    return Row(
        subject=case.model,
        provider=provider,
        status=status,
        reason=reason,
        mode=case.mode,
        batch=case.batch,
        dtype=case.dtype,
        axes={"size": case.size} if case.size else {},
    )


def _words(case: Case) -> str:
    return f"{case.model} batch {case.batch} {case.mode}"


def _bus_id(target: Target) -> str:
    """The PCI bus id of the GPU that children use, as nvidia-smi has it; empty on a CPU or where there is no nvidia-smi."""
    return "".join(ask_gpu("pci.bus_id")) if target.device == "cuda" else ""
