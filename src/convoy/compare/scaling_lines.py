"""What a scaling run found, as tables, lines of text and charts: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from convoy.compare.runfile import Row
from convoy.report.curves import Series, curves_chart
from convoy.report.sheet import Card, Cell, Part, Section, Table, table_of

HEADS: Final = (
    "net", "gpus", "scaling", "batch a gpu", "provider", "images/s", "efficiency", "step ms", "compute", "exposed", "bound",
    "launch", "input", "",
)  # fmt: skip
NUMBERS: Final = (1, 3, 5, 6, 7, 8, 9, 10, 11, 12)

PARTS: Final = ("kernels", "launches", "exposed communication", "input")
"""Where a step's time goes, with its batch from the host; on a CPU, and where nobody may profile, launches count as kernels."""


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each row."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        head = (row.subject, str(row.axes["gpus"]), str(row.axes["scaling"]), str(row.batch), row.provider)
        if not row.ok:
            lines.append((*head, *[""] * 8, row.status))
            continue
        share = row.figure("efficiency")
        speed = row.figure("images_per_s")
        cells = [f"{speed.p50:.0f}" if speed else "", f"{share.p50:.1%}" if share else ""]
        for metric in ("step_ms", "compute_ms", "exposed_ms", "bound_ms", "launch_ms", "input_ms"):
            figure = row.figure(metric)
            cells.append(f"{figure.p50:.2f}" if figure else "")
        lines.append((*head, *cells, "noisy" if row.noisy else ""))
    return lines


def settings(rows: Sequence[Row]) -> list[str]:
    """How each provider was set, once."""
    return list(dict.fromkeys(f"{row.provider}: {row.setting}" for row in rows if row.ok))


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each row that is not `ok`, with its reason."""
    return [
        f"{row.provider} on {row.axes['gpus']}, {row.axes['scaling']}: {row.status}: {row.reason}"
        for row in rows
        if not row.ok
    ]


def charts(rows: Sequence[Row]) -> list[str]:
    """Throughput and efficiency over GPUs for each net and scaling; none with one number of GPUs."""
    drawn: list[str] = []
    for net, scaling in dict.fromkeys((row.subject, str(row.axes["scaling"])) for row in rows):
        own = [row for row in rows if (row.subject, row.axes["scaling"]) == (net, scaling)]
        speeds = _lines(own, "images_per_s")
        if any(len(points) > 1 for points in speeds.values()):
            series: list[Series] = []
            for provider, points in speeds.items():
                (first, speed), *_ = points
                series.append(Series(provider, points))
                series.append(
                    Series(f"{provider}, perfect", tuple((x, speed * x / first) for x, _ in points), dashed=True)
                )
            title = f"{net}, {scaling} scaling"
            drawn.append(curves_chart(f"{title}: images a second over GPUs", "GPUs", "images a second", series))
            shares = [Series(provider, points) for provider, points in _lines(own, "efficiency").items()]
            drawn.append(curves_chart(f"{title}: efficiency over GPUs", "GPUs", "efficiency", shares, log_y=False))
    return drawn


def _lines(rows: Sequence[Row], metric: str) -> dict[str, tuple[tuple[float, float], ...]]:
    """By provider, a figure over GPUs."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        figure = row.figure(metric)
        if figure is not None:
            found.setdefault(row.provider, []).append((float(row.axes["gpus"]), figure.p50))
    return {provider: tuple(sorted(points)) for provider, points in found.items()}


def _parts(row: Row) -> dict[str, float]:
    """Milliseconds by `PARTS`."""
    values = {figure.metric: figure.p50 for figure in row.figures}
    compute = values.get("compute_ms", values.get("step_ms", 0.0))
    launches = min(values.get("launch_ms", 0.0), compute)
    parts = (compute - launches, launches, values.get("exposed_ms", 0.0), values.get("input_ms", 0.0))
    return dict(zip(PARTS, parts, strict=True))


def _time_table(rows: Sequence[Row]) -> Table:
    good = [row for row in rows if row.ok]
    most = max((sum(_parts(row).values()) for row in good), default=0.0) or 1.0
    lines: list[tuple[Cell, ...]] = []
    for row in good:
        parts = _parts(row)
        bar = tuple(
            Part(value / most, index, f"{name} {value:.2f} ms") for index, (name, value) in enumerate(parts.items())
        )
        said = ", ".join(f"{name} {value:.2f}" for name, value in parts.items() if value)
        where = f"{row.subject}, {row.axes['gpus']} {row.axes['scaling']}, {row.provider}"
        lines.append((Cell(where), Cell("", sum(parts.values()), bar=bar), Cell(said)))
    return Table(("gpus", "time of a step", "ms"), tuple(lines), page_only=(1,))


def section_of(rows: Sequence[Row]) -> tuple[list[Card], list[Section]]:
    """A run as a part of the page."""
    cards: list[Card] = []
    most = max((int(row.axes["gpus"]) for row in rows if row.ok), default=0)
    for row in rows:
        share = row.figure("efficiency")
        if share is not None and most > 1 and row.axes["gpus"] == most:
            words = f"{row.subject}: efficiency on {most} GPUs, {row.axes['scaling']} scaling, {row.provider}"
            cards.append(Card(f"{share.p50:.1%}", words, good=row.provider == "convoy"))
    lines = (*settings(rows), *failures(rows), *(f"{row.provider}: {note}" for row in rows for note in row.notes))
    sections = [
        Section(
            "Training on several GPUs",
            tuple(dict.fromkeys(lines)),
            (table_of(HEADS, table(rows), NUMBERS),),
            tuple(charts(rows)),
        )
    ]
    if any(row.ok for row in rows):
        about = "Medians; a step's time with its batch copied from the host's pinned memory."
        sections.append(Section("Where a step's time goes", (about,), (_time_table(rows),), legend=PARTS))
    return cards, sections
