"""PlanTable: the plans of finished searches, by a key of the net, the target and the settings."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection
from typing import Final

from convoy.perfdb import sql
from convoy.perfdb.store import DatabaseFile

MOST_PLANS: Final = 500
"""Plans in a database; a further one takes the place of the oldest. A plan of ResNet-50 takes some 100 kB."""


class PlanTable:
    """The table `plans` of a database file.

    Args:
        store: the file.
    """

    def __init__(self, store: DatabaseFile) -> None:
        self._store = store

    def get(self, key: str) -> str | None:
        """The text under a key."""
        return self._store.read(lambda connection: sql.select_pairs(connection, "plans", key)).get(key)

    def put(self, key: str, text: str) -> None:
        """Store a text; one with the same key is replaced."""

        def work(connection: Connection) -> None:
            sql.delete_plan(connection, key)  # the new one is then the youngest
            sql.put_pairs(connection, "plans", {key: text})
            sql.drop_oldest_plans(connection, MOST_PLANS)

        self._store.write(work)

    def keys(self) -> list[str]:
        """The keys of all plans, the oldest first."""
        return self._store.read(sql.plan_keys)

    def clear(self) -> int:
        """Delete all plans; returns how many there were."""
        return self._store.write(lambda connection: sql.drop_oldest_plans(connection, 0))

    def sum_of_rows(self, problems: Sequence[str] | None) -> str:
        """A text that changes when a row of these problems is added, replaced or deleted; None: of all problems."""
        rows, seals = self._store.read(lambda connection: sql.sum_of_rows(connection, problems))
        return f"{rows} rows, seals {seals}"
