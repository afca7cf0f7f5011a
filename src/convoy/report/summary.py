"""Summary: everything that one optimisation found out. Its `to_dict` is the schema of `--json` (docs/reference/json.md)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from convoy.schedule.timeline import Span

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """Latency of one way to run the whole net: median and half the distance from the 20th to the 80th percentile."""

    name: str
    median_ms: float
    spread_ms: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """Cost of tuning: seconds, candidates measured now, candidates known from the database."""

    seconds: float
    measured: int
    from_database: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the shared workspace, of the values' arena, and of both with packed constants."""

    workspace_bytes: int
    activation_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Strategy:
    """Sum of the steps' times under one strategy; `predicted`: whether one of them was not measured."""

    strategy: str
    total_us: float
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class SelectionSummary:
    """The solver's choice, and the results of other strategies; `predicted`: whether a step's time was not measured."""

    solver: str
    total_us: float
    bound_us: float
    greedy_us: float
    strategies: tuple[Strategy, ...]
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class ScheduleSummary:
    """Streams used; the steps' predicted time one after another; and that of the longest chain that need one another."""

    streams: int
    serial_us: float
    critical_us: float


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One candidate of one layer; times are 0 unless its status is `ok`. `predicted`: its time was not measured."""

    engine: str
    knobs: str
    layout: str
    status: str
    median_us: float
    spread_us: float
    workspace_bytes: int
    error: float
    reason: str
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What an engine that skips zeros takes for a layer of whose input so many percent are zero; of what, says `kind`."""

    engine: str
    zeros: int
    median_us: float
    kind: str = "zeros"


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One step of the plan: the chosen candidate, the alternatives, and the time of a direct, dense algorithm at peak rates.

    `predicted` and `baseline_predicted` say that `median_us` and (a part of) `baseline_us` were not measured. `floor_us` is None
    where the device's peak rates are not known; Winograd, FFT and skipped zeros may take less. `zeros` is the share of zeros
    in a convolution's input, on the inputs that were tuned with; None where it was not counted. So are `dead_channels`,
    `dead_tiles` and `dead_blocks`, of what is zero as a whole. `candidates` are those for these shares; `curve` is the time
    over the share, where an engine skips zeros. `algorithm` is the engine's algorithm.
    """

    name: str
    problem: str
    engine: str
    knobs: str
    layout: str
    median_us: float
    baseline_us: float
    workspace_bytes: int
    floor_us: float | None
    flops: int
    bytes_min: int
    candidates: tuple[CandidateRow, ...]
    zeros: float | None = None
    dead_channels: float | None = None
    dead_tiles: float | None = None
    dead_blocks: float | None = None
    curve: tuple[CurvePoint, ...] = ()
    algorithm: str = ""
    predicted: bool = False
    baseline_predicted: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole result.

    Attributes:
        model: the name that the user gave.
        target: `Target.to_dict()`.
        batch: first side of the first input.
        dtype: dtype of the first input.
        numerics: the rounding that was allowed.
        inputs: shapes, as text.
        baseline: the stock model.
        optimized: the result; equal to the baseline where nothing was faster.
        speedup: baseline over optimized.
        rel_l2_error: against a float64 run, all outputs together.
        max_abs_error: likewise.
        baseline_rel_l2_error: the stock model's own error.
        tuning: cost of tuning.
        memory: memory of the plan.
        selection: how it was chosen.
        layers: the steps.
        peaks: measured ceilings of the device: `bytes_per_s`, and FLOP/s by dtype; empty without enough memory to measure them.
        notes: every fallback and refusal that concerns the whole net, a line each.
        versions: Convoy's version and the protocol's id.
        date: ISO 8601, UTC.
        schedule: how the steps were spread, and the bounds of any schedule of theirs.
        timeline: when each step ran, measured; empty where the plan is the baseline.
    """

    model: str
    target: dict[str, Any]
    batch: int
    dtype: str
    numerics: str
    inputs: tuple[str, ...]
    baseline: Timing
    optimized: Timing
    speedup: float
    rel_l2_error: float
    max_abs_error: float
    baseline_rel_l2_error: float
    tuning: Tuning
    memory: Memory
    selection: SelectionSummary
    layers: tuple[LayerSummary, ...]
    peaks: dict[str, float]
    notes: tuple[str, ...]
    versions: dict[str, str]
    date: str
    schedule: ScheduleSummary = ScheduleSummary(1, 0.0, 0.0)
    timeline: tuple[Span, ...] = ()
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """JSON's types, nested."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def _plain(value: Any) -> Any:
    """A value of a summary as JSON's types: `dataclasses.asdict`, which copies each number, takes five times as long."""
    if isinstance(value, (str, int, float)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in cast("Sequence[Any]", value)]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in cast("Mapping[str, Any]", value).items()}
    return {name: _plain(getattr(value, name)) for name in _field_names(cast("type[Any]", type(value)))}


@lru_cache(maxsize=64)
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def write_json(summary: Summary, path: Path) -> None:
    """Write the summary as JSON, whole or not at all."""
    from convoy.plan.file import write_text

    write_text(path, json.dumps(summary.to_dict(), indent=1) + "\n", "json")
