"""When each step of a plan runs, planned or measured, and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.plan.describe import title
from convoy.plan.plan import Step
from convoy.schedule.dag import dag_of


@dataclass(frozen=True, slots=True)
class Span:
    """One step on its stream.

    Attributes:
        name: what it computes.
        engine: the engine's id.
        stream: index of its stream.
        start_us: its start, relative to the first step's.
        duration_us: its time.
        critical: whether it is on the critical path.
    """

    name: str
    engine: str
    stream: int
    start_us: float
    duration_us: float
    critical: bool


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the time of any schedule of these steps.

    Attributes:
        serial_us: the steps one after another.
        critical_us: the longest chain of dependent steps, with any number of streams.
    """

    serial_us: float
    critical_us: float


def planned(steps: Sequence[Step]) -> list[Span]:
    """Each step as soon as its stream is free and its waits have ended, without contention."""
    ends: list[float] = []
    free: dict[int, float] = {}
    starts: list[float] = []
    for step in steps:
        start = max([free.get(step.stream, 0.0), *(ends[before] for before in step.waits)])
        starts.append(start)
        ends.append(start + step.median_us)
        free[step.stream] = ends[-1]
    return spans(steps, starts, [step.median_us for step in steps])


def spans(steps: Sequence[Step], starts_us: Sequence[float], durations_us: Sequence[float]) -> list[Span]:
    """Steps with their times; the critical path is the longest chain under these times."""
    critical = set(dag_of(steps, durations_us).critical_path())
    return [
        Span(title(step), step.config.engine, step.stream, start, duration, index in critical)
        for index, (step, start, duration) in enumerate(zip(steps, starts_us, durations_us, strict=True))
    ]


def bounds(steps: Sequence[Step]) -> Bounds:
    """The bounds of a plan's steps, by their predicted times."""
    dag = dag_of(steps, [step.median_us for step in steps])
    return Bounds(dag.total_us, dag.critical_us)


def chrome_trace(timelines: Mapping[str, Sequence[Span]], row: str = "stream") -> dict[str, object]:
    """Timelines in the Trace Event Format that Perfetto reads: one process each, a row for each stream, microseconds.

    Args:
        timelines: such as `planned` and `measured`, by name.
        row: what a row is, for its name: `stream 0`, `stream 1`, ...
    """
    events: list[dict[str, object]] = []
    for process, (name, found) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        for stream in sorted({span.stream for span in found}):
            named = {"name": f"{row} {stream}"}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": stream, "args": named})
        events += [_event(process, span) for span in found]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _event(process: int, span: Span) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": "critical" if span.critical else "side",
        "cname": "terrible" if span.critical else "good",
        "pid": process,
        "tid": span.stream,
        "ts": round(span.start_us, 3),
        "dur": round(span.duration_us, 3),
        "args": {"engine": span.engine, "critical": span.critical},
    }
