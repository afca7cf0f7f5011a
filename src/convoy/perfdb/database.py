"""Database: every measurement so far, the user's own rows before the shipped ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from sqlite3 import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Self

from convoy.errors import InputError, unknown_name
from convoy.perfdb import shipped, sql
from convoy.perfdb.csv_rows import file_form
from convoy.perfdb.location import checked_path, default_path
from convoy.perfdb.merge import read_database
from convoy.perfdb.plan_table import PlanTable
from convoy.perfdb.record import check_digest, clip_reason, read_record, read_target, read_text, target_json, to_record
from convoy.perfdb.row import Measurement, Status
from convoy.perfdb.shipped import ShippedTables
from convoy.perfdb.store import DatabaseFile
from convoy.perfdb.summary import DatabaseInfo, ImportResult, read_info
from convoy.perfdb.transfer import ImportBatch, read_file, write_all
from convoy.problem import is_subgraph_key
from convoy.target import Target

if TYPE_CHECKING:
    from convoy.perfdb.shipped_table import ShippedTable
    from convoy.perfdb.time_columns import TimeColumns


class Database:
    """Measurements by problem, target and protocol. Use `open`; it is a context manager, safe for threads, processes and forks.

    A fault of the file never ends a session: see `warnings` and `in_memory`. `plans` holds what finished searches chose.
    """

    def __init__(self, path: Path | None, *, shipped: bool, create: bool = True) -> None:
        self._store = DatabaseFile(path, create=create)
        self._with_shipped = shipped
        self._tables = ShippedTables(self.warnings)
        self.plans = PlanTable(self._store)

    @staticmethod
    def open(path: Path | None = None, *, shipped: bool = True, create: bool = True) -> Database:
        """Open the database; a missing file is created.

        Args:
            path: the file; None: `CONVOY_DB`, or `convoy/perf.db` in the user's cache folder.
            shipped: whether `lookup` also uses the results that come with the package.
            create: if False, a missing file is not created: the database is empty and in memory.

        Raises:
            InputError: the path is a folder or a device.
        """
        return Database(checked_path(path or default_path()), shipped=shipped, create=create)

    @staticmethod
    def memory(*, shipped: bool = False) -> Database:
        """A database that is never written to a file: for tests, and for sessions that must leave no trace."""
        return Database(None, shipped=shipped)

    @property
    def path(self) -> Path | None:
        """The file; None for a database that was opened in memory."""
        return self._store.path

    @property
    def in_memory(self) -> bool:
        """Whether the session works in memory, as requested or because the file cannot be used."""
        return self._store.in_memory

    @property
    def warnings(self) -> list[str]:
        """What went wrong with the file, one line for each event, to be shown to the user."""
        return self._store.warnings

    def close(self) -> None:
        """Close the file, after a last try to write results that could not be written before."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lookup(self, problem: str, target: str, protocol: str) -> list[Measurement]:
        """All rows of a problem with this target digest and this protocol id, ordered by engine, version and knobs.

        A shipped row is left out if the user has a row of the same config.
        """
        rows = self._store.read(lambda connection: sql.lookup(connection, problem, target, protocol))
        own = {row.config for row in rows}
        rows += [row for row in self._shipped(target, lambda s: s.lookup(problem, protocol)) if row.config not in own]
        return _ordered(rows)

    def measured(self, problem: str, target: str, protocol: str) -> list[Measurement]:
        """The rows of `lookup` that need not be measured again: those that ship for a CPU only predict.

        Machines with the same processor differ in memory, clock rates and what else they run. GPUs of one name do not.
        """
        if not self._tables.is_of_cpu(target):
            return self.lookup(problem, target, protocol)
        return _ordered(self._store.read(lambda connection: sql.lookup(connection, problem, target, protocol)))

    def _shipped(self, target: str, ask: Callable[[ShippedTable], Sequence[Measurement]]) -> Sequence[Measurement]:
        """The answer of the results that ship for a target."""
        return self._tables.query(target, ask, ()) if self._with_shipped else ()

    def targets(self) -> dict[str, Target]:
        """All described targets, the user's and those of the shipped results, by digest."""
        return {**(shipped.shipped_descriptions() if self._with_shipped else {}), **self._descriptions()}

    def good_layers(self, target: str, protocol: str) -> list[Measurement]:
        """The good rows of one target's layers by one protocol: the user's, then the shipped ones."""
        own = [row for row in self.rows(target=target, status="ok") if row.protocol == protocol]
        found = self._shipped(target, lambda table: table.rows(protocol))
        return [row for row in (*own, *found) if row.ok and not is_subgraph_key(row.problem)]

    def times(self, target: Target, protocols: Sequence[str]) -> TimeColumns:
        """Times of good rows of this target and of others with the same device, as columns: for prediction, not for replay.

        They may come from other software versions. The target's own rows come first, then the user's, then the shipped ones.
        For problems without such a row, rows of earlier protocols follow, then rows of devices with the same cores
        (`Target.has_same_cores`), for a CPU then those of other CPUs, scaled (`Target.time_factor`). Subgraphs are left out,
        because a subgraph's key does not say what it computes.

        Args:
            target: the device.
            protocols: protocol ids, the preferred one first.
        """

        def own(digest: str) -> list[Measurement]:
            return self.rows(target=digest, status="ok")

        from convoy.perfdb.related import related_times  # numpy takes 0.1 s to import

        return related_times(target, self.targets(), protocols, own, self._tables if self._with_shipped else None)

    def _descriptions(self) -> dict[str, Target]:
        """The user's described targets, by digest."""
        texts = self._store.read(lambda connection: sql.select_pairs(connection, "targets"))
        return {digest: read_target(digest, text) for digest, text in texts.items()}

    def put(
        self, rows: Iterable[Measurement], texts: Mapping[str, str] | None = None, *, targets: Iterable[Target] = ()
    ) -> None:
        """Write rows in one transaction; they are stored when this returns. A row with the same key is replaced.

        Args:
            rows: the measurements; an overlong reason (a compiler's log) is cut.
            texts: texts of subgraph problems, by key.
            targets: the targets whose digests the rows hold.

        Raises:
            InputError: naming the field of a row that is out of range. Nothing is written then.
        """
        records = [{**(record := to_record(row)), "reason": clip_reason(str(record["reason"]))} for row in rows]
        for record in records:
            read_record(record)
        checked = dict(read_text(key, text) for key, text in (texts or {}).items())
        described = {target.digest: target_json(target) for target in targets}
        for digest, text in described.items():
            read_target(digest, text)

        def work(connection: Connection) -> None:
            sql.put_records(connection, records)
            sql.put_pairs(connection, "texts", checked)
            sql.put_pairs(connection, "targets", described)

        self._store.write(work)

    def rows(
        self, *, problem: str = "", engine: str = "", status: str = "", target: str = "", limit: int | None = None
    ) -> list[Measurement]:
        """The user's own rows, grouped by problem, the fastest first, failures last.

        Args:
            problem: part of the problem's key.
            engine: an engine's id.
            status: a status word.
            target: a target's digest or its beginning.
            limit: most rows to return.
        """
        filters = _filters(problem=problem, engine=engine, status=status, target=target)
        if limit is not None and limit < 0:
            raise InputError("limit", limit, "a number of rows of at least 0")
        return self._store.read(lambda connection: sql.select(connection, filters, limit))

    def count(self, *, problem: str = "", engine: str = "", status: str = "", target: str = "") -> int:
        """How many rows `rows` would return without a limit."""
        filters = _filters(problem=problem, engine=engine, status=status, target=target)
        return self._store.read(lambda connection: sql.count(connection, filters))

    def text(self, problem: str) -> str | None:
        """The text of a subgraph problem, by its key."""
        return self._store.read(lambda connection: sql.select_pairs(connection, "texts", problem)).get(problem)

    def target(self, digest: str) -> Target | None:
        """The target of a digest."""
        text = self._store.read(lambda connection: sql.select_pairs(connection, "targets", digest)).get(digest)
        return read_target(digest, text) if text is not None else None

    def info(self) -> DatabaseInfo:
        """Numbers about the contents."""
        return read_info(self._store, shipped.shipped_targets() if self._with_shipped else ())

    def export(self, path: Path, *, problem: str = "", engine: str = "", status: str = "", target: str = "") -> int:
        """Write the user's rows that pass the filters as CSV (only rows) or JSON lines (texts and targets too), by suffix.

        Returns:
            The number of rows.

        Raises:
            InputError: for another suffix, and for a file that cannot be written.
        """
        file_form(path)
        rows = self.rows(problem=problem, engine=engine, status=status, target=target)
        problems, digests = {row.problem for row in rows}, {row.target for row in rows}
        texts = self._store.read(lambda connection: sql.select_pairs(connection, "texts"))
        targets = self._store.read(lambda connection: sql.select_pairs(connection, "targets"))
        write_all(
            rows,
            {key: text for key, text in texts.items() if key in problems},
            {key: text for key, text in targets.items() if key in digests},
            path,
        )
        return len(rows)

    def export_shipped(self, folder: Path, *, target: str = "") -> list[Path]:
        """Write the user's rows in the form that ships with the package: one `TARGET.rows.gz` for each target."""
        return shipped.write_shipped(self.rows(target=target), folder, self._descriptions())

    def import_(self, path: Path, *, partial: bool = False) -> ImportResult:
        """Add an export (.csv, .jsonl, either with .gz) in one transaction.

        Every row is checked, and the newest row of a key stays.

        Args:
            path: the export.
            partial: whether good lines are added although others are rejected; else one bad line rejects the file.

        Raises:
            InputError: the file cannot be read or is no export.
        """
        return self._take_in(read_file(path), partial)

    def merge(self, path: Path, *, partial: bool = False) -> ImportResult:
        """Add the rows of another database, which is only read; rows, checks and arguments as in `import_`.

        Raises:
            InputError: there is no performance database at `path`.
        """
        return self._take_in(read_database(path, self.path), partial)

    def _take_in(self, incoming: ImportBatch, partial: bool) -> ImportResult:
        if incoming.refused and not partial:
            return ImportResult(0, 0, 0, 0, tuple(incoming.refused))
        records = [to_record(row) for row in incoming.rows]

        def work(connection: Connection) -> int:
            sql.put_pairs(connection, "texts", incoming.texts)
            sql.put_pairs(connection, "targets", incoming.targets)
            return sql.put_records(connection, records, newer_only=True)

        written = self._store.write(work)
        return ImportResult(
            written, len(records) - written, len(incoming.texts), len(incoming.targets), tuple(incoming.refused)
        )

    def clear(self, *, engine: str = "", target: str = "") -> int:
        """Delete the user's rows: of one engine, of one target (its whole digest), of both, or all of them.

        Returns:
            The number of rows deleted.
        """
        filters = _filters(engine=engine, target=check_digest(target) if target else "")
        removed = self._store.write(lambda connection: sql.delete(connection, filters))
        self._store.shrink()
        return removed


def _ordered(rows: Iterable[Measurement]) -> list[Measurement]:
    return sorted(rows, key=lambda row: (row.config.engine, row.config.version, str(row.config.knobs)))


def _filters(**words: str) -> dict[str, str]:
    filters = {name: word for name, word in words.items() if word}
    if "status" in filters and filters["status"] not in {str(member) for member in Status}:
        raise unknown_name("status", filters["status"], Status)
    return filters
