"""One target's shipped rows, as columns until they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cached_property, lru_cache
from typing import IO, Any

import numpy as np

from convoy.errors import InputError
from convoy.perfdb.record import checked_row, checked_text, checked_value
from convoy.perfdb.row import Measurement, Status
from convoy.perfdb.shipped_form import RowColumns, decode_rows
from convoy.perfdb.time_columns import Flags, TimeColumns
from convoy.problem import EngineConfig, is_subgraph_key


def read_table(file: IO[bytes], name: str, target: str) -> ShippedTable:
    """The table in a file; raises InputError if it is damaged, of another target or of another form."""
    return ShippedTable(decode_rows(file, name, target), name, target)


class ShippedTable:
    """The rows that ship for one target, checked when they are used.

    A net uses some hundred of tens of thousands, and predictions use columns of them alone (`times`). All databases of a process
    share a table (`convoy.perfdb.shipped.open_shipped`), so nothing that it returns can be changed in it.
    """

    def __init__(self, columns: RowColumns, name: str, target: str) -> None:
        self._columns, self._name, self._target = columns, name, target
        self._read: dict[tuple[str, str], tuple[Measurement, ...]] = {}

    @cached_property
    def _places(self) -> dict[tuple[str, str], range]:
        """Where the rows of a problem by a protocol stand."""
        problem, protocol = (self._columns.texts[name] for name in ("problem", "protocol"))
        changes = (np.diff(problem.index) != 0) | (np.diff(protocol.index) != 0)
        starts = np.concatenate(([0], np.flatnonzero(changes) + 1))[: len(self._columns)]
        keys = zip(problem.taken(starts).entries(), protocol.taken(starts).entries(), strict=True)
        stops = [*starts[1:].tolist(), len(self._columns)]
        found = {key: range(*each) for key, each in zip(keys, zip(starts.tolist(), stops, strict=False), strict=False)}
        if len(found) < len(starts):
            raise InputError(
                self._name, "rows of one problem in several places", "the rows of a problem one behind the other"
            )
        return found

    @cached_property
    def _is_layer(self) -> Flags:
        """Which problems are no subgraphs."""
        return np.array([not is_subgraph_key(key) for key in self._columns.problems.keys], dtype=np.bool_)

    def lookup(self, problem: str, protocol: str) -> tuple[Measurement, ...]:
        """The rows of a problem by a protocol; raises InputError if one is malformed."""
        key = (problem, protocol)
        found = self._read.get(key)
        if found is None:
            found = self._read[key] = tuple(self._rows_at(self._places[key])) if key in self._places else ()
        return found

    def rows(self, protocol: str = "", wanted: Callable[[str], bool] | None = None) -> list[Measurement]:
        """The rows of all or of the wanted problems, of one protocol or of all; raises InputError if one is malformed."""
        keys = [key for key in self._places if protocol in ("", key[1]) and (wanted is None or wanted(key[0]))]
        return [row for key in keys for row in self.lookup(*key)]

    def times(self, protocol: str, known: Collection[str]) -> TimeColumns:
        """The times of the good rows by a protocol, without subgraphs and without the problems whose keys are known."""
        columns = self._columns
        problem, problems = columns.texts["problem"].index, columns.problems
        chosen = columns.texts["protocol"].equals(protocol) & columns.texts["status"].equals(Status.OK)
        chosen &= (columns.numbers["median_us"] > 0) & (problems.are_new(known) & self._is_layer)[problem]
        return TimeColumns(
            problems,
            problem,
            columns.texts["config"],
            columns.numbers["median_us"],
            columns.numbers["samples"].astype(np.int64),
            columns.numbers["deterministic"],
        ).taken(chosen)

    def _rows_at(self, places: range) -> Iterator[Measurement]:
        part = slice(places.start, places.stop)
        texts = {name: column.taken(part).entries() for name, column in self._columns.texts.items()}
        numbers = {name: column[part].tolist() for name, column in self._columns.numbers.items()}
        for place, row in enumerate(places):
            try:
                values = {name: checked_value(name, column[place]) for name, column in numbers.items()}
                values |= {name: checked_text(name, texts[name][place]) for name in texts if name != "config"}
                yield checked_row({**values, **_config_values(texts["config"][place]), "target": self._target})
            except InputError as error:
                raise InputError(self._name, f"row {row}", "well-formed rows", str(error)) from None


@lru_cache(maxsize=1 << 14)
def _config_values(config: str) -> dict[str, Any]:
    """Engine, version and knobs of a config's text, checked; raises InputError on anything else."""
    found = EngineConfig.parse(config)
    values = {"engine": found.engine, "version": found.version, "knobs": config.partition("[")[2].removesuffix("]")}
    return {name: checked_value(name, value) for name, value in values.items()}
