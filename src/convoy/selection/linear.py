"""A linear program with integer columns, as plain lists, before it is passed to a solver."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Terms = list[tuple[int, float]]
"""A linear expression: (column, coefficient); a column may occur more than once."""


@dataclass(slots=True)
class LinearProgram:
    """Minimise cost · x subject to row bounds and column bounds.

    Attributes:
        cost: cost of each column.
        upper: upper bound of each column; the lower bound is 0.
        integer: whether a column must be an integer.
        rows: (least, most, expression) of each row.
    """

    cost: list[float] = field(default_factory=list[float])
    upper: list[float] = field(default_factory=list[float])
    integer: list[bool] = field(default_factory=list[bool])
    rows: list[tuple[float, float, Terms]] = field(default_factory=list[tuple[float, float, Terms]])

    def binary(self, cost: float = 0.0) -> int:
        """Add a column that is 0 or 1 and return its index."""
        return self._column(cost, 1.0, integer=True)

    def continuous(self, cost: float = 0.0) -> int:
        """Add a column of at least 0 and return its index."""
        return self._column(cost, math.inf, integer=False)

    def _column(self, cost: float, upper: float, *, integer: bool) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def equal(self, terms: Terms, value: float) -> None:
        """Add the row `terms == value`."""
        self._add(value, value, terms)

    def at_most(self, terms: Terms, most: float) -> None:
        """Add the row `terms <= most`."""
        self._add(-math.inf, most, terms)

    def at_least(self, terms: Terms, least: float) -> None:
        """Add the row `terms >= least`."""
        self._add(least, math.inf, terms)

    def broken(self, values: Sequence[float], tolerance: float) -> str:
        """The first row or bound that a solution breaks by more than a tolerance, in words ("row 3: ..."); empty if none.

        Args:
            values: the value of every column.
            tolerance: absolute, for rows, bounds and the distance of an integer column from an integer.
        """
        for column, (value, upper, integer) in enumerate(zip(values, self.upper, self.integer, strict=True)):
            if not -tolerance <= value <= upper + tolerance:
                return f"column {column}: {value:g} is not in [0, {upper:g}]"
            if integer and abs(value - round(value)) > tolerance:
                return f"column {column}: {value:g} is not an integer"
        for row, (least, most, terms) in enumerate(self.rows):
            total = math.fsum(coefficient * values[column] for column, coefficient in terms)
            if not least - tolerance <= total <= most + tolerance:
                return f"row {row}: {total:g} is not in [{least:g}, {most:g}]"
        return ""

    def _add(self, least: float, most: float, terms: Terms) -> None:
        merged: dict[int, float] = {}
        for column, coefficient in terms:
            merged[column] = merged.get(column, 0.0) + coefficient
        self.rows.append((least, most, [(c, v) for c, v in merged.items() if v]))


def plus(columns: Iterable[int], coefficient: float = 1.0) -> Terms:
    """The sum of columns, times a coefficient."""
    return [(column, coefficient) for column in columns]


def minus(columns: Iterable[int]) -> Terms:
    """The negative sum of columns."""
    return plus(columns, -1.0)
