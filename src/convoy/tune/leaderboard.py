"""Standing: what was measured of one problem so far, and who leads."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.activation_sparsity import SparsityBucket, matches_bucket
from convoy.engines.manifest import BASELINE
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig


class Leaderboard:
    """Rows of a problem.

    Args:
        classes: the kinds of input that there is a winner for.
        deterministic: whether what may give different bits from run to run can win.

    Attributes:
        rows: by config.
    """

    def __init__(self, classes: Sequence[SparsityBucket], *, deterministic: bool) -> None:
        self.rows: dict[EngineConfig, Measurement] = {}
        self.classes = classes
        self._deterministic = deterministic

    def is_usable(self, row: Measurement) -> bool:
        """Whether it may win."""
        return row.ok and (row.deterministic or not self._deterministic)

    def usable(self, levels: SparsityBucket | None = None) -> list[Measurement]:
        """What may win; on inputs of some levels, or on any."""
        found = filter(self.is_usable, self.rows.values())
        return [row for row in found if levels is None or matches_bucket(row.config.knobs, levels)]

    def best(self, levels: SparsityBucket | None = None) -> Measurement | None:
        """The fastest of them."""
        return min(self.usable(levels), key=lambda row: row.median_us, default=None)

    def bests(self) -> list[Measurement]:
        """The fastest on each kind of input."""
        return [row for levels in self.classes if (row := self.best(levels)) is not None]

    def limit_us(self) -> float | None:
        """What a candidate must come near to be worth a look: the best time, on the kind of input on which it is longest."""
        return max((row.median_us for row in self.bests()), default=None)

    def baseline(self) -> Measurement | None:
        """PyTorch's own row."""
        own = (row for row in self.rows.values() if row.config.engine == BASELINE and self.is_usable(row))
        return next(own, None)

    def result_rows(self) -> list[Measurement]:
        """All rows; one that the settings exclude is `unsupported`, with the reason."""
        return [row if self.is_usable(row) or not row.ok else _excluded(row) for row in self.rows.values()]


def _excluded(row: Measurement) -> Measurement:
    return Measurement(
        row.problem,
        row.config,
        row.target,
        row.protocol,
        Status.UNSUPPORTED,
        deterministic=row.deterministic,
        reason="may give different bits from run to run, and `deterministic` was asked for",
        versions=row.versions,
        date=row.date,
    )
