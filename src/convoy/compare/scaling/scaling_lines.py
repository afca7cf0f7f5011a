"""Results of a scaling run, as tables, lines of text and charts: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from convoy.compare.runs.rows import Figure, Row
from convoy.compare.scaling.scaling_jobs import BASELINE_KEPT
from convoy.compare.scaling.scaling_rows import count_of
from convoy.report.curves import Series, curves_figure
from convoy.report.sheet import Card, Cell, Part, Section, Table, table_of

HEADS: Final = (
    "net", "gpus", "scaling", "batch each", "provider", "images/s", "efficiency", "step ms", "compute", "exposed", "bound",
    "launch", "input", "remark",
)  # fmt: skip
NUMBERS: Final = (1, 3, 5, 6, 7, 8, 9, 10, 11, 12)

LINK_HEADS: Final = (
    "net", "gpus", "scaling", "provider", "MB", "GB/s", "all-reduce", "bound", "exposed", "20 %", "80 %",
    "running", "bare", "group", "host", "peak MiB",
)  # fmt: skip
LINK_NUMBERS: Final = (1, *range(4, 16))
LINK_CAPTION: Final = (
    "Communication, in milliseconds. MB: gradients. bound: 2 (n-1) / n of their bytes at the link's speed. exposed: how much"
    " longer a step takes with all-reduce than without, with the 20th and 80th percentile over the rounds. running: how long"
    " all-reduce kernels run in a step. bare: how long they run alone; what is exposed beyond that is other kernels made slower."
    " group: what the process group costs a single process. host: how long the host takes to launch a step."
)
"""Of the second table, which has the terms of the bound."""

GPUS: Final = "GPUs"
PROCESSES: Final = "processes"
"""What one number of a run counts: on a CPU its processes share the cores."""


def counted(device: str) -> str:
    """What a run on `device` (`cpu` or `cuda`) counts."""
    return PROCESSES if device == "cpu" else GPUS


def heads_of(heads: Sequence[str], unit: str) -> tuple[str, ...]:
    """A table's headings for what the run counts."""
    return tuple(unit.lower() if head == "gpus" else head for head in heads)


SCHEDULE: Final = "streams:"
"""Beginnings of a plan's notes on its schedule."""

PARTS: Final = ("kernels", "launches", "exposed communication", "process group", "input")
"""Where a step's time goes, with its batch from the host; on a CPU, and where nobody may profile, launches count as kernels."""


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each row."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        head = (row.subject, str(count_of(row)), str(row.axes["scaling"]), str(row.batch), row.provider)
        if not row.ok:
            lines.append((*head, *[""] * 8, row.status))
            continue
        share = row.figure("efficiency")
        speed = row.figure("images_per_s")
        cells = [f"{speed.p50:.0f}" if speed else "", f"{share.p50:.1%}" if share else ""]
        figures = [row.figure("step_ms"), row.figure("compute_ms"), exposed(row)]
        figures += [row.figure(metric) for metric in ("bound_ms", "launch_ms", "input_ms")]
        cells += [f"{figure.p50:.2f}" if figure else "" for figure in figures]
        lines.append((*head, *cells, _remark(row)))
    return lines


def _remark(row: Row) -> str:
    """Remarks on a row."""
    words = {BASELINE_KEPT: BASELINE_KEPT in row.setting, "noisy": row.noisy}
    return ", ".join(word for word, holds in words.items() if holds)


def link_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each row with figures: the terms of the bound, the measured time, and the host's time."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        if not row.ok:
            continue
        communication = exposed(row)
        spread = (f"{communication.p20:.2f}", f"{communication.p80:.2f}") if communication else ("", "")
        lines.append(
            (
                row.subject, str(count_of(row)), str(row.axes["scaling"]), row.provider,
                _shown(row.figure("gradient_bytes"), ".1f", 1e6), _shown(row.figure("link_gb_per_s"), ".1f"),
                _shown(row.figure("allreduce_ms")), _shown(row.figure("bound_ms")), _shown(communication), *spread,
                _shown(row.figure("collective_ms")), _shown(row.figure("bare_ms")), _shown(_group(row)),
                _shown(row.figure("host_ms")), _shown(row.figure("peak_memory_bytes"), ".0f", 2.0**20),
            )
        )  # fmt: skip
    return lines


def _shown(figure: Figure | None, form: str = ".2f", scale: float = 1.0) -> str:
    return f"{figure.p50 / scale:{form}}" if figure is not None else ""


def exposed(row: Row) -> Figure | None:
    """Communication that nothing hides; None with one process, which has none."""
    return row.figure("exposed_ms") if count_of(row) > 1 else None


def _group(row: Row) -> Figure | None:
    """The cost of the process group on one process; older files call it exposed communication."""
    return row.figure("group_ms") or (row.figure("exposed_ms") if count_of(row) == 1 else None)


def settings(rows: Sequence[Row]) -> list[str]:
    """How each provider was set; which of its rows, where they differ."""
    found: dict[str, dict[str, list[str]]] = {}
    where_of = _places(rows)
    for row in rows:
        if row.ok:
            found.setdefault(row.provider, {}).setdefault(row.setting, []).append(where_of(row))
    return [
        f"{provider}{f' on {_listed(where)}' if len(own) > 1 else ''}: {setting}"
        for provider, own in found.items()
        for setting, where in own.items()
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes of the providers, each line once, with the rows that it belongs to.

    How each row's schedule was found stands in the run file alone: a dozen lines for every number of GPUs.
    """
    found: dict[tuple[str, str], list[str]] = {}
    where_of = _places(rows)
    for row in rows:
        loud: Sequence[str] = row.detail.get("noisy", ())
        noise = [f"rounds of these kinds are noisy: {', '.join(loud)}"] if loud else []
        for note in (*(note for note in row.notes if not note.startswith(SCHEDULE)), *noise):
            found.setdefault((row.provider, note), []).append(where_of(row))
    return [f"{provider} on {_listed(where)}: {note}" for (provider, note), where in found.items()]


def _places(rows: Sequence[Row]) -> Callable[[Row], str]:
    """How lines say which row they are of: with the net where there are several."""
    several = len({row.subject for row in rows}) > 1

    def where(row: Row) -> str:
        return f"{f'{row.subject} on ' if several else ''}{count_of(row)} {row.axes['scaling']}"

    return where


def _listed(where: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(where))


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each row that is not `ok`, with its reason."""
    several = len({row.subject for row in rows}) > 1
    return [
        f"{f'{row.subject}: ' if several else ''}{row.provider} on {count_of(row)}, {row.axes['scaling']}: {row.status}:"
        f" {row.reason}"
        for row in rows
        if not row.ok
    ]


def charts(rows: Sequence[Row], unit: str = GPUS) -> list[str]:
    """Throughput and efficiency over GPUs (or processes) for each net and scaling; none with one number of them."""
    drawn: list[str] = []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.subject, str(row.axes["scaling"])), []).append(row)
    for (net, scaling), own in groups.items():
        speeds = _lines(own, "images_per_s")
        if any(len(points) > 1 for points in speeds.values()):
            # Providers first: so each has one colour in both charts.
            series = [Series(provider, points) for provider, points in speeds.items()]
            for provider, points in speeds.items():
                (first, speed), *_ = points
                perfect = tuple((x, speed * x / first) for x, _ in points)
                series.append(Series(f"{provider}, perfect", perfect, dashed=True))
            title = f"{net}, {scaling} scaling"
            drawn.append(curves_figure(f"{title}: images per second over {unit}", unit, "images per second", series))
            shares = [Series(provider, points) for provider, points in _lines(own, "efficiency").items()]
            drawn.append(curves_figure(f"{title}: efficiency over {unit}", unit, "efficiency", shares, log_y=False))
    return drawn


def _lines(rows: Sequence[Row], metric: str) -> dict[str, tuple[tuple[float, float], ...]]:
    """By provider, a figure over GPUs."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        figure = row.figure(metric)
        if figure is not None:
            found.setdefault(row.provider, []).append((float(count_of(row)), figure.p50))
    return {provider: tuple(sorted(points)) for provider, points in found.items()}


def _parts(row: Row) -> dict[str, float]:
    """Milliseconds by `PARTS`."""
    values = {figure.metric: figure.p50 for figure in row.figures}
    compute = values.get("compute_ms", values.get("step_ms", 0.0))
    launches = min(values.get("launch_ms", 0.0), compute)
    apart = [figure.p50 if figure is not None else 0.0 for figure in (exposed(row), _group(row))]
    return dict(zip(PARTS, (compute - launches, launches, *apart, values.get("input_ms", 0.0)), strict=True))


def _length(row: Row) -> float:
    """Of a row's bar: differences below zero are noise and have none."""
    return sum(max(0.0, value) for value in _parts(row).values())


def _time_table(rows: Sequence[Row], unit: str) -> Table:
    good = [row for row in rows if row.ok]
    most = max(map(_length, good), default=0.0) or 1.0
    lines: list[tuple[Cell, ...]] = []
    for row in good:
        parts = _parts(row)
        bar = tuple(
            Part(value / most, index, f"{name} {value:.2f} ms") for index, (name, value) in enumerate(parts.items())
        )
        said = ", ".join(f"{name} {value:.2f}" for name, value in parts.items() if value)
        where = f"{row.subject}, {count_of(row)} {unit}, {row.axes['scaling']}, {row.provider}"
        lines.append((Cell(where), Cell("", _length(row), bar=bar), Cell(said)))
    return Table(("row", "time of a step", "ms"), tuple(lines), page_only=(1,))


def section_of(rows: Sequence[Row], unit: str = GPUS) -> tuple[list[Card], list[Section]]:
    """A run as a part of the page; `unit` is what its numbers count: `GPUS`, or on a CPU `PROCESSES`."""
    cards: list[Card] = []
    most = max((count_of(row) for row in rows if row.ok), default=0)
    for row in rows:
        share = row.figure("efficiency")
        if share is not None and most > 1 and count_of(row) == most:
            words = f"{row.subject}: efficiency on {most} {unit}, {row.axes['scaling']} scaling, {row.provider}"
            cards.append(Card(f"{share.p50:.1%}", words, good=row.provider == "convoy"))
    lines = (*settings(rows), *notes(rows), *failures(rows))
    tables = [table_of(heads_of(HEADS, unit), table(rows), NUMBERS)]
    if any(row.ok for row in rows):
        tables.append(
            replace(table_of(heads_of(LINK_HEADS, unit), link_table(rows), LINK_NUMBERS), caption=LINK_CAPTION)
        )
    sections = [
        Section(f"Training on several {unit}", tuple(dict.fromkeys(lines)), tuple(tables), tuple(charts(rows, unit)))
    ]
    if any(row.ok for row in rows):
        about = (
            "Medians of a step whose batch is copied from the host's pinned memory. A part that is a difference of two times"
            " may be below zero: then it is smaller than the noise."
        )
        sections.append(Section("Where a step's time goes", (about,), (_time_table(rows, unit),), legend=PARTS))
    return cards, sections
