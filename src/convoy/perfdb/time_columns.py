"""Measured times as columns: what predictions use of tens of thousands of rows, without an object for each row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from convoy.perfdb.row import Measurement
from convoy.problem.layer_coordinates import NO_COORDINATES, SIZES, ProblemFacts, facts_of_key

Indices = NDArray[np.int64]
Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class TextColumn:
    """A column of texts that occur again and again.

    Attributes:
        texts: the different texts.
        index: for each entry, its place in `texts`.
    """

    texts: Sequence[str]
    index: Indices

    @staticmethod
    def of(entries: Sequence[str]) -> TextColumn:
        """A column of these entries; `texts` are in the order in which they occur first."""
        places: dict[str, int] = {}
        index = [places.setdefault(entry, len(places)) for entry in entries]
        return TextColumn(tuple(places), np.array(index, dtype=np.int64))

    @staticmethod
    def joined(columns: Sequence[TextColumn]) -> TextColumn:
        """Several columns, one behind the other."""
        places: dict[str, int] = {}
        parts: list[Indices] = []
        for column in columns:
            own = [places.setdefault(text, len(places)) for text in column.texts]
            parts.append(np.array(own, dtype=np.int64)[column.index] if own else column.index)
        return TextColumn(tuple(places), _concatenated(parts, np.int64))

    def entries(self) -> list[str]:
        """The texts, one for each entry."""
        places: list[int] = self.index.tolist()
        return [self.texts[place] for place in places]

    def taken(self, chosen: Any) -> TextColumn:
        """The chosen entries, by a mask or by their places."""
        return TextColumn(self.texts, self.index[chosen])

    def equals(self, text: str) -> Flags:
        """Which entries are this text."""
        return self.index == (self.texts.index(text) if text in self.texts else -1)


@dataclass(frozen=True, eq=False, slots=True)
class ProblemColumns:
    """Problems and their facts (`ProblemFacts`), an entry for each problem.

    Attributes:
        keys: their keys.
        described: whether there are facts; 0 and empty texts stand in the other columns if there are none.
        kinds: layer kinds.
        sizes: logarithms of the sizes of the implicit GEMM, [problems, 3].
        filters: as in `LayerCoordinates`.
        arithmetic: likewise.
        epilogues: likewise.
        pooled: likewise.
        flops: operations.
        bytes_min: least bytes to move.
    """

    keys: Sequence[str]
    described: Flags
    kinds: TextColumn
    sizes: Numbers
    filters: TextColumn
    arithmetic: TextColumn
    epilogues: TextColumn
    pooled: Flags
    flops: Numbers
    bytes_min: Numbers

    @staticmethod
    def of(keys: Sequence[str]) -> ProblemColumns:
        """The problems with these keys."""
        found = [facts_of_key(key) for key in keys]
        facts = [each or NO_FACTS for each in found]
        return ProblemColumns(
            keys,
            np.array([each is not None for each in found], dtype=np.bool_),
            TextColumn.of([each.kind for each in facts]),
            np.array([each.coordinates.sizes for each in facts], dtype=np.float64).reshape(-1, SIZES),
            TextColumn.of([each.coordinates.filters for each in facts]),
            TextColumn.of([each.coordinates.arithmetic for each in facts]),
            TextColumn.of([each.coordinates.epilogue for each in facts]),
            np.array([each.coordinates.pooled for each in facts], dtype=np.bool_),
            np.array([each.flops for each in facts], dtype=np.float64),
            np.array([each.bytes_min for each in facts], dtype=np.float64),
        )

    @staticmethod
    def joined(parts: Sequence[ProblemColumns]) -> ProblemColumns:
        """Several lists of problems, one behind the other."""
        return ProblemColumns(
            [key for part in parts for key in part.keys],
            _concatenated([part.described for part in parts], np.bool_),
            TextColumn.joined([part.kinds for part in parts]),
            _concatenated([part.sizes for part in parts], np.float64).reshape(-1, SIZES),
            TextColumn.joined([part.filters for part in parts]),
            TextColumn.joined([part.arithmetic for part in parts]),
            TextColumn.joined([part.epilogues for part in parts]),
            _concatenated([part.pooled for part in parts], np.bool_),
            _concatenated([part.flops for part in parts], np.float64),
            _concatenated([part.bytes_min for part in parts], np.float64),
        )

    def are_new(self, known: Collection[str]) -> Flags:
        """Which problems are not among the known keys."""
        return np.array([key not in known for key in self.keys], dtype=np.bool_)


NO_FACTS: Final = ProblemFacts("", NO_COORDINATES, 0, 0)


@dataclass(frozen=True, eq=False, slots=True)
class TimeColumns:
    """Times of good rows, an entry for each row.

    Attributes:
        problems: the problems.
        problem: place of the row's problem in `problems`.
        configs: the configs' texts (`str(EngineConfig)`).
        median_us: median time of one launch, microseconds.
        samples: number of timed samples.
        deterministic: whether the same inputs gave the same bits in every launch.
    """

    problems: ProblemColumns
    problem: Indices
    configs: TextColumn
    median_us: Numbers
    samples: Indices
    deterministic: Flags

    def __len__(self) -> int:
        return len(self.problem)

    @staticmethod
    def of(rows: Iterable[Measurement]) -> TimeColumns:
        """The times of rows that are `ok`; others are left out."""
        good = [row for row in rows if row.ok]
        problem = TextColumn.of([row.problem for row in good])
        return TimeColumns(
            ProblemColumns.of(problem.texts),
            problem.index,
            TextColumn.of([str(row.config) for row in good]),
            np.array([row.median_us for row in good], dtype=np.float64),
            np.array([row.samples for row in good], dtype=np.int64),
            np.array([row.deterministic for row in good], dtype=np.bool_),
        )

    @staticmethod
    def joined(parts: Sequence[TimeColumns]) -> TimeColumns:
        """The times of several sources, one behind the other."""
        counts = [len(part.problems.keys) for part in parts]
        starts = [sum(counts[:place]) for place in range(len(parts))]
        return TimeColumns(
            ProblemColumns.joined([part.problems for part in parts]),
            _concatenated([part.problem + start for part, start in zip(parts, starts, strict=True)], np.int64),
            TextColumn.joined([part.configs for part in parts]),
            _concatenated([part.median_us for part in parts], np.float64),
            _concatenated([part.samples for part in parts], np.int64),
            _concatenated([part.deterministic for part in parts], np.bool_),
        )

    def measured_problems(self) -> set[str]:
        """Keys of the problems that have a row here."""
        places: list[int] = np.unique(self.problem).tolist()
        return {self.problems.keys[place] for place in places}

    def scaled(self, factor: float) -> TimeColumns:
        """The same rows with all times multiplied by a factor."""
        return replace(self, median_us=self.median_us * factor)

    def taken(self, chosen: Flags) -> TimeColumns:
        """The chosen rows."""
        return TimeColumns(
            self.problems,
            self.problem[chosen],
            self.configs.taken(chosen),
            self.median_us[chosen],
            self.samples[chosen],
            self.deterministic[chosen],
        )


NO_TIMES: Final = TimeColumns.of(())


def _concatenated(parts: Sequence[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=kind)
