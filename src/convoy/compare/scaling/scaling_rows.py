"""Rows of data-parallel training: their figures from a job's rounds, and their efficiency."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from convoy.compare.runs.rows import Figure, Row
from convoy.compare.scaling.scaling_jobs import COUNT_AXIS, STRONG, ScalingJob, parts_of
from convoy.errors import InputError

COUNT: Final = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)
"""A number of GPUs or processes in a run file."""

NOISY: Final = 0.10
"""A relative spread of the rounds above this is noise."""

UNITS: Final[dict[str, str]] = {
    "step_ms": "ms",
    "compute_ms": "ms",
    "exposed_ms": "ms",
    "group_ms": "ms",
    "input_ms": "ms",
    "host_ms": "ms",
    "launch_ms": "ms",
    "allreduce_ms": "ms",
    "collective_ms": "ms",
    "bare_ms": "ms",
    "bound_ms": "ms",
    "link_gb_per_s": "GB/s",
    "gradient_bytes": "B",
    "peak_memory_bytes": "B",
    "images_per_s": "1/s",
    "efficiency": "1",
}
"""Metrics of a scaling row, with their units (docs/how-to/scale.md)."""

DIFFERENCES: Final = ("exposed_ms", "group_ms", "input_ms")
"""Metrics that are differences of two kinds of rounds: below zero where there is less to see than noise."""


def result_row(job: ScalingJob, result: Mapping[str, Any]) -> Row:
    """The row of the result that rank 0 wrote."""
    rounds: Mapping[str, Sequence[float]] = result["rounds"]
    step = rounds_figure("step_ms", rounds["step"])
    figures = [step]
    if "compute" in rounds:
        # One process does not communicate: the cost of its group is buckets, hooks and copies.
        name = "exposed_ms" if job.world > 1 else "group_ms"
        figures.append(rounds_figure("compute_ms", rounds["compute"]))
        figures.append(_difference(name, rounds["step"], rounds["compute"]))
    if "input" in rounds:
        figures.append(_difference("input_ms", rounds["input"], rounds["step"]))
    values: Mapping[str, float] = result["values"]
    figures += [Figure.once(name, UNITS[name], float(value)) for name, value in values.items()]
    images = job.batch * job.world * 1e3
    figures.append(Figure("images_per_s", "1/s", images / step.p50, images / step.p80, images / step.p20))
    if "link_gb_per_s" in values and values["link_gb_per_s"] > 0:
        moved = 2 * (job.world - 1) / job.world * values["gradient_bytes"]
        figures.append(Figure.once("bound_ms", "ms", moved / values["link_gb_per_s"] / 1e6))
    loud = [name for name, own in rounds.items() if relative_spread(own) > NOISY]
    detail = {"backend": str(result["backend"]), "rounds": {name: list(own) for name, own in rounds.items()}}
    return job.row(
        setting=str(result["setting"]),
        figures=tuple(figures),
        noisy=bool(loud),
        notes=tuple(map(str, result["notes"])),
        detail={**detail, "noisy": loud} if loud else detail,
    )


def _difference(metric: str, more: Sequence[float], less: Sequence[float]) -> Figure:
    """Difference of two kinds of rounds, round by round: a disturbance of a whole round cancels."""
    return rounds_figure(metric, [one - other for one, other in zip(more, less, strict=True)])


def relative_spread(values: Sequence[float]) -> float:
    """Half the distance from the 20th to the 80th percentile, over the median."""
    found = rounds_figure("step_ms", values)
    return found.spread / found.p50 if found.p50 else 0.0


def rounds_figure(metric: str, seconds: Sequence[float]) -> Figure:
    """Milliseconds from a round's seconds a step."""
    ordered = sorted(1e3 * value for value in seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Figure(metric, UNITS[metric], at(0.5), at(0.2), at(0.8))


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """The rows with their efficiency: images a second and GPU over that of the fewest GPUs, of the same provider and scaling.

    One process sends nothing. So where a provider that sends bf16 has no row of one process, that of the plain provider counts,
    or its own computation with the plain provider's cost of the process group, if that is faster: else a better plan would count
    as efficiency.
    """
    base: dict[tuple[object, ...], Row] = {}
    for row in sorted(rows, key=count_of):
        if row.ok:
            base.setdefault(_series(row, row.provider), row)
    return [_efficient(row, _base(row, base)) if row.ok else row for row in rows]


def _base(row: Row, base: Mapping[tuple[object, ...], Row]) -> Row:
    own = base[_series(row, row.provider)]
    plain = base.get(_series(row, parts_of(row.provider)[0]), own)
    return plain if count_of(plain) == 1 < count_of(own) else own


def _series(row: Row, provider: str) -> tuple[object, ...]:
    """Fields that the rows of one line share. Batches of strong scaling differ from row to row."""
    return (
        row.subject,
        provider,
        row.dtype,
        row.axes["scaling"],
        row.batch * (count_of(row) if _is_strong(row) else 1),
    )


def _is_strong(row: Row) -> bool:
    return row.axes["scaling"] == STRONG


def count_of(row: Row) -> int:
    """How many GPUs a row is for, or processes if it is of a CPU; older files call both `gpus`.

    Raises:
        InputError: the row, of a file, has no such number.
    """
    found = next((row.axes[name] for name in reversed(COUNT_AXIS.values()) if name in row.axes), None)
    if not (isinstance(found, int | float | str) and COUNT.fullmatch(str(found)[:20])):
        raise InputError("axes of a row of scaling", found, "a number of GPUs or processes", "The run file is damaged.")
    return int(found)


def _speed_of_one(base: Row) -> float:
    """Images a second and GPU."""
    speed = base.figure("images_per_s")
    assert speed is not None
    return speed.p50 / count_of(base)


def _speed_alone(row: Row, base: Row) -> float:
    """Images a second and GPU that another provider's row would reach if nothing were sent: its plan may be the faster one.

    Zero where the base is the row's own provider, or a row does not tell.
    """
    compute, group = row.figure("compute_ms"), base.figure("group_ms")
    if base.provider == row.provider or compute is None or group is None:
        return 0.0
    return 1e3 * row.batch / (compute.p50 + max(0.0, group.p50))


def _efficient(row: Row, base: Row) -> Row:
    speed = row.figure("images_per_s")
    assert speed is not None
    value = speed.p50 / count_of(row) / max(_speed_of_one(base), _speed_alone(row, base))
    kept = tuple(figure for figure in row.figures if figure.metric != "efficiency")
    return replace(row, figures=(*kept, Figure.once("efficiency", "1", value)))
