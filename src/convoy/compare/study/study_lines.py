"""Results of a study, as tables, lines of text and charts: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from convoy.compare.runs.predicted import has_predicted_total
from convoy.compare.runs.rows import Row
from convoy.compare.study.algorithm_study import best_by_point
from convoy.compare.study.study_winners import TIME, SweepCurve, curves, in_words
from convoy.plan.describe import total_text
from convoy.report.curves import Series, curves_figure
from convoy.report.sheet import Cell, Part, Table

HEADS: Final = ("layer", "winner", "us", "workspace", "energy uJ", "error", "second", "us", "setting")
EVERY_HEADS: Final = (
    "layer", "algorithm", "us", "20 %", "80 %", "workspace", "energy uJ", "error", "setting, or why not",
)  # fmt: skip


def layer_table(rows: Sequence[Row]) -> Table:
    """A line for each layer: the winner and the second."""
    lines = [_winner(own) for own in best_by_point(rows)]
    return _without_empty(Table(HEADS, tuple(lines), numbers=(2, 3, 4, 5, 7)))


def _winner(own: Sequence[Row]) -> tuple[Cell, ...]:
    first = own[0]
    if not first.ok:
        blank = (Cell(""),) * 6
        return (Cell(_where(first)), Cell("none"), *blank, Cell(f"{first.status}: {first.reason[:80]}"))
    second = own[1] if len(own) > 1 and own[1].ok else None
    return (
        Cell(_where(first)),
        Cell(first.provider),
        _time(first),
        _bytes(first),
        _energy(first),
        _error(first),
        Cell(second.provider if second else ""),
        _time(second) if second else Cell(""),
        Cell(first.setting),
    )


def every_table(rows: Sequence[Row]) -> Table:
    """A line for each layer and algorithm, the fastest of a layer first; those that failed say how. For the page alone."""
    lines = [_algorithm(row) for own in best_by_point(rows) for row in own]
    found = _without_empty(Table(EVERY_HEADS, tuple(lines), numbers=(2, 3, 4, 5, 6, 7)))
    return replace(found, page_only=tuple(range(len(found.heads))))


def _algorithm(row: Row) -> tuple[Cell, ...]:
    time = row.figure(TIME)
    if time is None:
        blank = (Cell(""),) * 5
        return (
            Cell(_where(row)),
            Cell(row.provider),
            Cell(row.status, mark="bad"),
            *blank,
            Cell(row.reason, mark="soft"),
        )
    sides = (Cell(f"{side:.2f}", side, "soft") for side in (time.p20, time.p80))
    figures = (_bytes(row), _energy(row), _error(row))
    return (Cell(_where(row)), Cell(row.provider), _time(row), *sides, *figures, Cell(row.setting, mark="soft"))


def _without_empty(table: Table) -> Table:
    """Without the column of energy where nobody asked for it: it is nothing but width."""
    at = table.heads.index("energy uJ")
    if any(row[at].text for row in table.rows):
        return table
    rows = tuple((*row[:at], *row[at + 1 :]) for row in table.rows)
    numbers = tuple(index - (index > at) for index in table.numbers if index != at)
    return Table((*table.heads[:at], *table.heads[at + 1 :]), rows, table.caption, numbers)


def _where(row: Row) -> str:
    axes = " ".join(f"{name} {value}" for name, value in row.axes.items()) or row.subject
    return f"{axes}, {row.mode}, {row.dtype}"


def strategy_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each net and strategy: sum of the launches' times, memory, and how it stands to exact selection.

    Predicted sums are marked, and compared with nothing.
    """
    exact = {
        row.question: _value(row, "total_us")
        for row in rows
        if row.provider == "exact" and row.ok and not has_predicted_total(row)
    }
    lines: list[tuple[str, ...]] = []
    for row in rows:
        if not row.ok:
            lines.append((row.subject, row.provider, "", "", "", row.reason[:80]))
            continue
        total, best = _value(row, "total_us"), exact.get(row.question, 0.0)
        ratio = f"{total / best:.2f}x" if best and not has_predicted_total(row) else ""
        memory = f"{_value(row, 'peak_memory_bytes') / 1e6:.1f}"
        how = f"{row.setting}, {_predicted(row)}" if has_predicted_total(row) else row.setting
        lines.append((row.subject, row.provider, _total(row, total), ratio, memory, how))
    return lines


def _total(row: Row, total_us: float) -> str:
    """A strategy's sum in milliseconds, marked if a part of it is predicted."""
    return total_text(total_us, predicted=has_predicted_total(row)).removesuffix(" ms")


def _predicted(row: Row) -> str:
    detail = row.detail
    if "predicted_steps" in detail:
        return f"{detail['predicted_steps']} of {detail.get('steps', 0)} times predicted"
    return f"{detail['predicted']} of {detail.get('problems', 0)} problems predicted"


def strategy_notes(rows: Sequence[Row]) -> list[str]:
    """Notes on the figures of strategies, each line once."""
    return list(dict.fromkeys(f"{row.subject}: {note}" for row in rows for note in row.notes))


def strategy_bars(rows: Sequence[Row]) -> Table:
    """A bar for each net and strategy, as long as its share of the net's slowest."""
    good = [row for row in rows if row.ok]
    most: dict[tuple[object, ...], float] = {}
    for row in good:
        most[row.question] = max(most.get(row.question, 0.0), _value(row, "total_us"))
    lines: list[tuple[Cell, ...]] = []
    for row in good:
        total_us = _value(row, "total_us")
        said = f"{row.subject}, {row.provider}: {_total(row, total_us)} ms"
        bar = (Part(total_us / (most[row.question] or 1.0), int(row.provider == "exact"), said),)
        where = f"{row.subject}, batch {row.batch}, {row.dtype}: {row.provider}"
        lines.append((Cell(where), Cell("", total_us, bar=bar), Cell(_total(row, total_us), total_us)))
    times = "times" if any(map(has_predicted_total, good)) else "measured times"
    return Table(("net and strategy", f"sum of {times}", "ms"), tuple(lines), numbers=(2,), page_only=(1,))


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
    """(caption, SVG) for each curve and each measured quantity: time, workspace, energy."""
    found: list[tuple[str, str]] = []
    # Every algorithm has a line in every chart, if an empty one: so it has the same colour in all of them.
    names = sorted({row.provider for row in rows})
    for curve in curves(rows):
        for metric, label in CHARTS:
            svg = curves_figure(
                f"{curve.title}: {label.partition(',')[0]}", curve.axis, label, _series(curve, metric, names)
            )
            if svg:
                found.append((in_words(curve), svg))
    return found


def _series(curve: SweepCurve, metric: str, names: Sequence[str]) -> list[Series]:
    found: list[Series] = []
    times = curve.times(metric)
    for name in names:
        values = times.get(name, (None,) * len(curve.values))
        points = tuple((x, y) for x, y in zip(curve.values, values, strict=True) if y is not None)
        found.append(Series(name, points if any(y for _, y in points) else ()))
    return found


def _value(row: Row, metric: str) -> float:
    figure = row.figure(metric)
    return figure.p50 if figure is not None else 0.0


def _time(row: Row) -> Cell:
    time_us = _value(row, TIME)
    return Cell(f"{time_us:.2f}" + (" noisy" if row.noisy else ""), time_us, "bad" if row.noisy else "")


def _bytes(row: Row) -> Cell:
    size = _value(row, "workspace_bytes")
    text = f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / 1024:.0f} KiB" if size else "0"
    return Cell(text, size)


def _energy(row: Row) -> Cell:
    figure = row.figure("energy_uj")
    return Cell(f"{figure.p50:.4g}", figure.p50) if figure is not None else Cell("")


def _error(row: Row) -> Cell:
    error = _value(row, "rel_l2_error")
    return Cell(f"{error:.0e}", error)
