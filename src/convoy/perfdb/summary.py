"""A database's contents in numbers, and the result of an import, for people and for JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from convoy.perfdb import sql
from convoy.perfdb.store import DatabaseFile
from convoy.perfdb.transfer import RejectedRow


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The result of an import or a merge.

    Attributes:
        measurements: rows written, because they are new or newer than the stored ones.
        unchanged: good rows left out, because the database has the same row with the same or a later date.
        texts: subgraph texts written.
        targets: targets written.
        refused: malformed lines.
    """

    measurements: int
    unchanged: int
    texts: int
    targets: int
    refused: tuple[RejectedRow, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """A database's contents.

    Attributes:
        path: the file; empty for a database in memory.
        in_memory: whether nothing is kept, as requested or because the file cannot be used.
        schema_version: version of the tables.
        journal: SQLite's journal mode (`wal`, `delete` or `memory`).
        size_bytes: size of the file.
        measurements: number of rows.
        texts: number of subgraph texts.
        plans: number of plans of finished searches.
        status: number of rows by status.
        engine: number of rows by engine.
        target: number of rows by target digest.
        targets: names of the described targets, by digest.
        shipped: digests of the targets with shipped results.
        warnings: what went wrong with the file.
    """

    path: str
    in_memory: bool
    schema_version: int
    journal: str
    size_bytes: int
    measurements: int
    texts: int
    plans: int
    status: dict[str, int]
    engine: dict[str, int]
    target: dict[str, int]
    targets: dict[str, str]
    shipped: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def read_info(store: DatabaseFile, shipped: Sequence[str]) -> DatabaseInfo:
    """Numbers about the contents of a file.

    Args:
        store: the file.
        shipped: digests of the targets with shipped results.
    """
    path = store.path
    targets = store.read(lambda connection: sql.select_pairs(connection, "targets"))
    return DatabaseInfo(
        path=str(path or ""),
        in_memory=store.in_memory,
        schema_version=store.read(sql.schema_version),
        journal=store.read(sql.journal),
        size_bytes=path.stat().st_size if path is not None and path.exists() else 0,
        measurements=store.read(lambda connection: sql.count(connection, {})),
        texts=len(store.read(lambda connection: sql.select_pairs(connection, "texts"))),
        plans=len(store.read(sql.plan_keys)),
        status=store.read(lambda connection: sql.count_by(connection, "status")),
        engine=store.read(lambda connection: sql.count_by(connection, "engine")),
        target=store.read(lambda connection: sql.count_by(connection, "target")),
        targets={digest: str(json.loads(text)["name"]) for digest, text in targets.items()},
        shipped=tuple(shipped),
        warnings=tuple(store.warnings),
    )
