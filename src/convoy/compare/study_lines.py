"""What a study found, as tables, lines of text and charts: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from convoy.compare.runfile import Row
from convoy.compare.study import best_by_point
from convoy.compare.study_winners import TIME, Curve, curves, in_words
from convoy.report.curves import Series, curves_chart
from convoy.report.sheet import Cell, Part, Table

HEADS: Final = ("layer", "winner", "us", "workspace", "error", "second", "us", "setting")
NUMBERS: Final = (2, 3, 4, 6)


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each layer: the winner, and who comes second."""
    lines: list[tuple[str, ...]] = []
    for own in best_by_point(rows):
        first = own[0]
        axes = " ".join(f"{name} {value}" for name, value in first.axes.items()) or first.subject
        where = f"{axes}, {first.mode}, {first.dtype}"
        if not first.ok:
            lines.append((where, "none", "", "", "", "", "", f"{first.status}: {first.reason[:80]}"))
            continue
        second = own[1] if len(own) > 1 and own[1].ok else None
        lines.append(
            (
                where, first.provider, _shown(first, TIME), _bytes(first), f"{_value(first, 'rel_l2_error'):.0e}",
                second.provider if second else "", _shown(second, TIME) if second else "", first.setting,
            )
        )  # fmt: skip
    return lines


def strategy_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each net and strategy: sum of measured times, memory, and how it stands to exact selection."""
    exact = {row.question: _value(row, "total_us") for row in rows if row.provider == "exact" and row.ok}
    lines: list[tuple[str, ...]] = []
    for row in rows:
        if not row.ok:
            lines.append((row.subject, row.provider, "", "", "", row.reason[:80]))
            continue
        total, best = _value(row, "total_us"), exact.get(row.question, 0.0)
        ratio = f"{total / best:.2f}x" if best else ""
        memory = f"{_value(row, 'peak_memory_bytes') / 1e6:.1f}"
        lines.append((row.subject, row.provider, f"{total / 1e3:.3f}", ratio, memory, row.setting))
    return lines


def strategy_bars(rows: Sequence[Row]) -> Table:
    """A bar for each net and strategy, as long as its share of the net's slowest."""
    good = [row for row in rows if row.ok]
    most: dict[tuple[object, ...], float] = {}
    for row in good:
        most[row.question] = max(most.get(row.question, 0.0), _value(row, "total_us"))
    lines: list[tuple[Cell, ...]] = []
    for row in good:
        total_us = _value(row, "total_us")
        said = f"{row.subject}, {row.provider}: {total_us / 1e3:.3f} ms"
        bar = (Part(total_us / (most[row.question] or 1.0), int(row.provider == "exact"), said),)
        where = f"{row.subject}, batch {row.batch}, {row.dtype}: {row.provider}"
        lines.append((Cell(where), Cell("", total_us, bar=bar), Cell(f"{total_us / 1e3:.3f}", total_us)))
    return Table(("net and strategy", "sum of measured times", "ms"), tuple(lines), numbers=(2,), page_only=(1,))


STRATEGY_HEADS: Final = ("net", "strategy", "sum ms", "over exact", "memory MB", "how")
STRATEGY_NUMBERS: Final = (2, 3, 4)


def winners(rows: Sequence[Row]) -> list[str]:
    """Where the winner changes, a line for each curve."""
    return [in_words(curve) for curve in curves(rows)]


CHARTS: Final = (
    (TIME, "time of a launch, us"),
    ("workspace_bytes", "workspace, bytes"),
    ("energy_uj", "energy of a launch, uJ"),
)


def charts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(what it says in words, SVG) for each curve and each figure that was taken: time, workspace, energy."""
    found: list[tuple[str, str]] = []
    for curve in curves(rows):
        for metric, label in CHARTS:
            svg = curves_chart(f"{label} over {curve.title}", curve.axis, label, _series(curve, metric))
            if svg:
                found.append((in_words(curve), svg))
    return found


def _series(curve: Curve, metric: str) -> list[Series]:
    found: list[Series] = []
    for name, values in curve.times(metric).items():
        points = tuple((x, y) for x, y in zip(curve.values, values, strict=True) if y is not None)
        found.append(Series(name, points if any(y for _, y in points) else ()))
    return found


def _value(row: Row, metric: str) -> float:
    figure = row.figure(metric)
    return figure.p50 if figure is not None else 0.0


def _shown(row: Row, metric: str) -> str:
    return f"{_value(row, metric):.2f}" + (" noisy" if row.noisy else "")


def _bytes(row: Row) -> str:
    size = _value(row, "workspace_bytes")
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / 1024:.0f} KiB" if size else "0"
