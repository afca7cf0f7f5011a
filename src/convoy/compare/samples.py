"""From the samples of a framework to its row: latency, throughput, and whether the samples are noisy."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from convoy.compare.case import Case
from convoy.compare.runs.rows import Figure, Row

LEAST_ROUNDS: Final = 3
ROUNDS_S: Final = 30.0
"""Slow calls get fewer rounds: about this long for each framework."""

NOISY: Final = 0.10
"""A relative spread above this is noise: interleaved timings of one program on a quiet machine are within 5 %."""

PER_ROUND: Final = ("latency_ms", "call_ms", "replay_ms")
"""Metrics with a value a round: a call that is waited for, a call among others, and the captured graph alone."""

LEAST_SINGLES: Final = 100
"""Calls below which there is no 99th percentile."""

MOST_REPEATS: Final = 2
"""How often noisy rounds are taken again."""


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
    ]
    if finished["peak_memory_bytes"] is not None:  # a framework that does not report its GPU memory
        figures.append(Figure.once("peak_memory_bytes", "B", finished["peak_memory_bytes"]))
    if finished.get("energy_j"):
        figures.append(Figure.once("energy_j", "J", finished["energy_j"]))
    detail = {**ready["detail"], "ways": ready["ways"]}
    if finished.get("kinds"):
        detail["kinds"] = {name: round(ms, 6) for name, ms in finished["kinds"].items()}
    notes = [*ready["notes"], *([finished["note"]] if finished.get("note") else [])]
    row = row_of(case, provider, "ok")
    row = dataclasses.replace(row, setting=ready["setting"], figures=tuple(figures), notes=tuple(notes), detail=detail)
    timed = with_samples(row, samples, in_turn=False)
    return dataclasses.replace(timed, detail={**timed.detail, "provisional": True})


def with_samples(row: Row, samples: Mapping[str, list[float]], *, in_turn: bool) -> Row:
    """The row with its times from these samples; whether it was timed in turn with others stands in its detail.

    The times are `latency_ms` and its 99th percentile, `call_ms`, `replay_ms` where the framework has a captured graph, and
    `images_per_s`, which follows from `call_ms`.
    """
    timed = [figure(metric, "ms", samples[metric]) for metric in PER_ROUND if metric in samples]
    call = next(f for f in timed if f.metric == "call_ms")
    rates = [row.batch / ms * 1e3 for ms in (call.p50, call.p80, call.p20)]
    timed.append(Figure("images_per_s", "1/s", *rates))
    if len(samples["single_ms"]) >= LEAST_SINGLES:
        p99 = statistics.quantiles(samples["single_ms"], n=100, method="inclusive")[98]
        timed.append(Figure.once("latency_p99_ms", "ms", p99))
    kept = tuple(f for f in row.figures if f.metric not in (*PER_ROUND, "images_per_s", "latency_p99_ms"))
    timing = {"timed": "in turn" if in_turn else "alone", "rounds": len(samples["latency_ms"])}
    detail = {**settled(row.detail), **timing}
    return dataclasses.replace(row, figures=(*timed, *kept), noisy=relative_spread(samples) > NOISY, detail=detail)


def settled(detail: Mapping[str, Any]) -> dict[str, Any]:
    """Without the mark of a row that waits for its turn."""
    return {name: value for name, value in detail.items() if name != "provisional"}


def figure(metric: str, unit: str, values: Sequence[float]) -> Figure:
    """Median, 20th and 80th percentile of samples."""
    if len(values) < 2:
        return Figure.once(metric, unit, values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return Figure(metric, unit, statistics.median(values), cuts[1], cuts[7])


def relative_spread(samples: Mapping[str, list[float]]) -> float:
    """Half the distance from the 20th to the 80th percentile of the latencies, over their median."""
    found = figure("latency_ms", "ms", samples["latency_ms"])
    return found.spread / found.p50 if found.p50 else 0.0


def row_of(case: Case, provider: str, status: str, reason: str = "") -> Row:
    """A row of a case, without figures."""
    return Row(
        subject=case.model,
        provider=provider,
        status=status,
        reason=reason,
        mode=case.mode,
        batch=case.batch,
        dtype=case.dtype,
        axes=case.axes,
    )
