"""Where the winner changes: the algorithms of each curve, point by point, and a summary in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from convoy.compare.runs.rows import Row
from convoy.errors import InputError

TIME: Final = "time_us"

TIE: Final = 0.05
"""Share within which two algorithms are equally fast: a change of winner closer than this is none."""

MOST_POINTS: Final = 100_000
"""Of a curve: algorithms times sizes. The widest study has 30 times 40."""

Question = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class WinnerRange:
    """Neighbouring points of a curve that one algorithm wins.

    Attributes:
        algorithm: the winner.
        first: value of the swept size from which on.
        last: value up to which.
        lead: the best other algorithm's time over the winner's at the last point; 1 where there is no other.
        second: that other algorithm; empty where there is none.
    """

    algorithm: str
    first: float
    last: float
    lead: float
    second: str


@dataclass(frozen=True, slots=True)
class SweepCurve:
    """The rows of one sweep, in one direction and dtype.

    Attributes:
        axis: the swept size's name.
        direction: fprop, dgrad or wgrad.
        dtype: of the tensors.
        values: the swept size.
        rows: by algorithm, its row at each value; None where it has no time.
    """

    axis: str
    direction: str
    dtype: str
    values: tuple[float, ...]
    rows: dict[str, tuple[Row | None, ...]]

    def times(self, metric: str = TIME) -> dict[str, tuple[float | None, ...]]:
        """By algorithm, a figure at each value."""
        return {name: tuple(_figure(row, metric) for row in rows) for name, rows in self.rows.items()}

    @property
    def title(self) -> str:
        """Caption."""
        return f"{self.axis}, {self.direction}, {self.dtype}"


def _figure(row: Row | None, metric: str) -> float | None:
    figure = row.figure(metric) if row is not None and row.ok else None
    return figure.p50 if figure is not None else None


def curves(rows: Sequence[Row]) -> list[SweepCurve]:
    """The sweeps among a study's rows."""
    found: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.subject.startswith("sweep:"):
            found[row.subject.removeprefix("sweep:"), row.mode, row.dtype, row.numerics].append(row)
    return [_curve(axis, direction, dtype, own) for (axis, direction, dtype, _), own in found.items()]


def _curve(axis: str, direction: str, dtype: str, rows: Sequence[Row]) -> SweepCurve:
    at = {(row.provider, float(row.axes[axis])): row for row in rows}
    values = tuple(sorted({value for _, value in at}))
    names = list(dict.fromkeys(row.provider for row in rows))
    if len(names) * len(values) > MOST_POINTS:
        raise InputError(
            "run", f"{len(names)} algorithms at {len(values)} sizes", f"at most {MOST_POINTS} points a curve"
        )
    return SweepCurve(axis, direction, dtype, values, {n: tuple(at.get((n, v)) for v in values) for n in names})


def stretches(curve: SweepCurve) -> list[WinnerRange]:
    """The winner of each range; a winner within `TIE` of the one before does not begin a new range."""
    found: list[WinnerRange] = []
    every = curve.times()
    for index, value in enumerate(curve.values):
        times = {name: time for name, own in every.items() if (time := own[index]) is not None}
        if not times:
            continue
        ranked = sorted(times, key=times.__getitem__)
        winner = ranked[0]
        before = found[-1].algorithm if found else ""
        if before in times and times[before] <= (1 + TIE) * times[winner]:
            winner = before
        others = [name for name in ranked if name != winner]
        lead = times[others[0]] / times[winner] if others else 1.0
        stretch = WinnerRange(winner, value, value, lead, others[0] if others else "")
        if winner == before:
            stretch = WinnerRange(winner, found.pop().first, value, lead, stretch.second)
        found.append(stretch)
    return found


def in_words(curve: SweepCurve) -> str:
    """One line: the winner of each range, and its advantage at the end of the range."""
    parts: list[str] = []
    found = stretches(curve)
    for index, stretch in enumerate(found):
        where = (
            f"from {stretch.first:g} to {stretch.last:g}" if stretch.first != stretch.last else f"at {stretch.first:g}"
        )
        if len(found) == 1:
            where = "everywhere"
        by = f" ({stretch.lead:.2f}x ahead of {stretch.second} at {stretch.last:g})" if stretch.second else ""
        if index == len(found) - 1 and stretch.lead < 1 + TIE and stretch.second:
            by = f" (level with {stretch.second})"
        parts.append(f"{stretch.algorithm} {where}{by}")
    return f"{curve.title}: " + (", then ".join(parts) or "nothing was measured")
