"""What a database holds, and what an import did to it, for people and for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from convoy.perfdb.transfer import RejectedRow


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What an import or a merge did.

    Attributes:
        measurements: rows written, because they are new or newer than the ones that were there.
        unchanged: good rows left out, as the database has the same fact with the same or a later date.
        texts: subgraph texts written.
        targets: targets written.
        refused: what was malformed, by line.
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
    """What a database holds.

    Attributes:
        path: the file; empty for a database in memory.
        in_memory: whether nothing is kept, by wish or because the file cannot be used.
        schema_version: version of the tables.
        journal: SQLite's journal mode (`wal`, `delete` or `memory`).
        size_bytes: size of the file.
        measurements: number of rows.
        texts: number of subgraph texts.
        status: number of rows by status.
        engine: number of rows by engine.
        target: number of rows by target's digest.
        targets: names of the targets that are described, by digest.
        shipped: digests of the targets that results come with the package for.
        warnings: what went wrong with the file.
    """

    path: str
    in_memory: bool
    schema_version: int
    journal: str
    size_bytes: int
    measurements: int
    texts: int
    status: dict[str, int]
    engine: dict[str, int]
    target: dict[str, int]
    targets: dict[str, str]
    shipped: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)
