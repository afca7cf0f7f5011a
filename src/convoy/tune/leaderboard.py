"""The rows of one problem so far, and the fastest of them."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.activation_sparsity import SparsityBucket, matches_bucket
from convoy.engines.manifest import BASELINE
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig


class Leaderboard:
    """Rows of one problem, with the fastest config of each sparsity bucket.

    Args:
        buckets: the sparsity buckets of the inputs; each has a winner of its own.
        deterministic: whether only configs that give the same bits in every run can win.

    Attributes:
        rows: the rows, by config.
    """

    def __init__(self, buckets: Sequence[SparsityBucket], *, deterministic: bool) -> None:
        self.rows: dict[EngineConfig, Measurement] = {}
        self.buckets = buckets
        self._deterministic = deterministic

    def is_usable(self, row: Measurement) -> bool:
        """Whether a row's config may win."""
        return row.ok and (row.deterministic or not self._deterministic)

    def usable(self, bucket: SparsityBucket | None = None) -> list[Measurement]:
        """Rows whose config may win: on inputs of one bucket, or (None) on any input."""
        found = filter(self.is_usable, self.rows.values())
        return [row for row in found if bucket is None or matches_bucket(row.config.knobs, bucket)]

    def best(self, bucket: SparsityBucket | None = None) -> Measurement | None:
        """The fastest usable row; None if there is none."""
        return min(self.usable(bucket), key=lambda row: row.median_us, default=None)

    def best_per_bucket(self) -> list[Measurement]:
        """The fastest usable row of each bucket that has one."""
        return [row for bucket in self.buckets if (row := self.best(bucket)) is not None]

    def limit_us(self) -> float | None:
        """The best time of the slowest bucket; a candidate far above it cannot win. None without usable rows."""
        return max((row.median_us for row in self.best_per_bucket()), default=None)

    def baseline(self) -> Measurement | None:
        """PyTorch's own row, if it is usable."""
        own = (row for row in self.rows.values() if row.config.engine == BASELINE and self.is_usable(row))
        return next(own, None)

    def result_rows(self) -> list[Measurement]:
        """All rows; a row that the settings exclude becomes `unsupported`, with the reason."""
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
