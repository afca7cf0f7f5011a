"""Frameworks side by side, as cards and sections of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from convoy.compare.layer_kinds import KINDS
from convoy.compare.runs.predicted import has_predicted_layers
from convoy.compare.runs.rows import Figure, Row, by_time, questions
from convoy.compare.runs.runfile import Run
from convoy.plan.describe import PREDICTED
from convoy.report.drawing import for_widths
from convoy.report.roofline import roofline_figure
from convoy.report.sheet import Card, Cell, Part, Section, Table
from convoy.report.timeline import timeline_chart
from convoy.schedule.timeline import Span


def sections_of(run: Run) -> tuple[list[Card], list[Section]]:
    """The fastest framework, a table for each question, and the time by layer kind, the roofline and the timeline where known."""
    cards: list[Card] = []
    sections: list[Section] = []
    for rows in questions(run.rows):
        ranked = [row for row in by_time(rows) if row.ok]
        if ranked:
            cards.append(_fastest(ranked))
        ordered = by_time(rows)
        words = tuple(_in_words(row) for row in ordered)
        table = frameworks_table(ordered)
        sections.append(
            Section(rows[0].label(), _compare_lines(ordered), (table,), terminal=words, about=_terms(table))
        )
        drawn = (_kinds(ranked), _roofline(ranked), _timeline(ranked))
        sections += [section for section in drawn if section is not None]
    return cards, sections


def _fastest(ranked: Sequence[Row]) -> Card:
    first = ranked[0]
    latency = first.figure("latency_ms")
    assert latency is not None
    words = f"{first.label()}: {first.provider} is the fastest"
    others = [row.figure("latency_ms") for row in ranked[1:]]
    if others and others[0] is not None:
        words += f", {others[0].p50 / latency.p50:.2f}x ahead of {ranked[1].provider}"
    return Card(f"{latency.p50:.3g} ms", words, good=first.provider == "convoy")


FRAMEWORK_HEADS: Final = (
    "framework", "latency ms", "+-", "20 %", "80 %", "99 %", "latency", "over best", "call ms", "replay ms", "images/s",
    "memory MiB", "start s", "compile s", "energy J", "error", "setting, or why not",
)  # fmt: skip
FRAMEWORK_PAGE: Final = ("20 %", "80 %", "99 %", "latency", "setting, or why not")
"""Columns of the page alone."""


def frameworks_table(rows: Sequence[Row]) -> Table:
    """A line for each framework; those that failed say how."""
    latencies = [f for row in rows if (f := row.figure("latency_ms")) is not None]
    best = min((f.p50 for f in latencies), default=1.0)
    most = max((f.p80 for f in latencies), default=1.0)
    lines = [_framework(row, best, most) for row in rows]
    # Without a captured graph, a counter of energy, or enough calls for a 99th percentile, a column is empty.
    empty = {
        at
        for at, head in enumerate(FRAMEWORK_HEADS)
        if head in ("99 %", "call ms", "replay ms", "energy J") and not any(own[at].text for own in lines)
    }
    kept = [at for at in range(len(FRAMEWORK_HEADS)) if at not in empty]
    heads = tuple(FRAMEWORK_HEADS[at] for at in kept)
    words = {"framework", "latency", "setting, or why not"}
    return Table(
        heads,
        tuple(tuple(own[at] for at in kept) for own in lines),
        numbers=tuple(at for at, head in enumerate(heads) if head not in words),
        page_only=tuple(at for at, head in enumerate(heads) if head in FRAMEWORK_PAGE),
        under=heads.index("setting, or why not"),
    )


def _framework(row: Row, best: float, most: float) -> tuple[Cell, ...]:
    latency = row.figure("latency_ms")
    if latency is None:
        blank = (Cell(""),) * (len(FRAMEWORK_HEADS) - 3)
        return (Cell(row.provider), Cell(row.status, mark="bad"), *blank, Cell(row.reason, mark="soft"))
    colour = 1 if row.provider == "convoy" else 0
    said = f"{row.provider}: {latency.p50:.3f} ms, from {latency.p20:.3f} to {latency.p80:.3f}"
    ratio = latency.p50 / best
    return (
        Cell(row.provider),
        Cell(f"{latency.p50:.3f}", latency.p50, "good" if ratio == 1 else ""),
        Cell(f"{latency.spread:.3f}" + (" noisy" if row.noisy else ""), latency.spread, "bad" if row.noisy else "soft"),
        *percentiles(latency),
        cell_of(row, "latency_p99_ms", ".3f"),
        Cell(
            "",
            latency.p50,
            bar=(Part(latency.p50 / most, colour, said),),
            spread=(latency.p20 / most, latency.p80 / most),
        ),
        Cell(f"{ratio:.2f}x", ratio),
        cell_of(row, "call_ms", ".3f"),
        cell_of(row, "replay_ms", ".3f"),
        cell_of(row, "images_per_s", ".1f"),
        cell_of(row, "peak_memory_bytes", ".0f", 2.0**20),
        cell_of(row, "startup_s", ".1f"),
        cell_of(row, "compile_s", ".1f"),
        cell_of(row, "energy_j", ".3f"),
        cell_of(row, "rel_l2_error", ".0e"),
        Cell(row.setting, mark="soft"),
    )


def percentiles(figure: Figure) -> tuple[Cell, ...]:
    """The 20th and the 80th percentile."""
    return tuple(Cell(f"{side:.3f}", side, "soft") for side in (figure.p20, figure.p80))


def cell_of(row: Row, metric: str, form: str, scale: float = 1.0) -> Cell:
    """A figure's median in a format, divided by a scale; empty where there is none."""
    found = row.figure(metric)
    return Cell(f"{found.p50 / scale:{form}}", found.p50) if found is not None else Cell("")


def _in_words(row: Row) -> str:
    """How a framework was set, or why it was not measured."""
    return f"{row.provider}: {row.setting}" if row.ok else f"{row.provider}: {row.status}: {row.reason}"


TERMS: Final = {
    "latency ms": "latency: median of one call and the wait for the device, with its spread (+-), percentiles, and a bar.",
    "over best": "over best: how many times the latency of the fastest.",
    "call ms": "call: one of many calls back to back; images/s follows from it.",
    "replay ms": "replay: the device's work alone, as a captured CUDA graph.",
    "memory MiB": "memory: the most that the process held (GPU: that calls allocated).",
    "start s": "start: until the framework was imported.",
    "compile s": "compile: building the setting that won, and its first call; Convoy's tuning is in it.",
    "error": "error: relative L2 error against float64.",
}
"""Column → what it means, a sentence each."""


def _terms(table: Table) -> tuple[str, ...]:
    """The meaning of the table's columns, for the page."""
    return (" ".join(words for head, words in TERMS.items() if head in table.heads),)


def _compare_lines(rows: Sequence[Row]) -> tuple[str, ...]:
    lines = [f"{row.provider}: {note}" for row in rows for note in row.notes]
    alone = [row.provider for row in rows if row.ok and row.detail.get("timed") == "alone"]
    if alone and len([row for row in rows if row.ok]) > 1:
        lines.append(f"timed alone and not in turn with the others: {', '.join(alone)}")
    return tuple(lines)


def _kinds(rows: Sequence[Row]) -> Section | None:
    """Time by layer kind, where frameworks tell it."""
    known = [row for row in rows if row.detail.get("kinds")]
    if not known:
        return None
    sums = {row.provider: sum(row.detail["kinds"].values()) for row in known}
    most = max(sums.values()) or 1.0
    lines: list[tuple[Cell, ...]] = []
    for row in known:
        times: Mapping[str, float] = row.detail["kinds"]
        mark = PREDICTED if has_predicted_layers(row) else ""
        parts = [
            Part(times[kind] / most, i, f"{kind} {mark}{times[kind]:.3f} ms")
            for i, kind in enumerate(KINDS)
            if kind in times
        ]
        text = ", ".join(f"{kind} {mark}{times[kind]:.2f}" for kind in KINDS if kind in times)
        lines.append((Cell(row.provider), Cell("", sums[row.provider], bar=tuple(parts)), Cell(text)))
    table = Table(("framework", "time by layer kind", "ms"), tuple(lines), page_only=(1,))
    about = "As each framework's own profiler tells it, which costs time itself; Convoy's are sums of its layers' single times."
    if any(map(has_predicted_layers, known)):
        about += f" {PREDICTED} marks sums with predicted times in them, which were not measured."
    return Section(f"Time by layer kind: {known[0].label()}", (about,), (table,), legend=KINDS)


def _roofline(rows: Sequence[Row]) -> Section | None:
    for row in rows:
        if row.detail.get("layers") and row.detail.get("peaks"):
            drawn = roofline_figure(row.detail["layers"], row.detail["peaks"], row.dtype)
            if drawn:
                return Section(f"Roofline: {row.label()}, {row.provider}", pictures=(drawn,))
    return None


def _timeline(rows: Sequence[Row]) -> Section | None:
    """When each step of Convoy's ran, on which stream."""
    for row in rows:
        spans = [Span(**span) for span in row.detail.get("timeline", ())]
        if spans:
            about = "Convoy's steps as they ran, launched one by one; the critical path in its own colour."
            return Section(
                f"Timeline: {row.label()}, {row.provider}",
                about=(about,),
                pictures=(for_widths(partial(timeline_chart, spans)),),
            )
    return None
