"""The schema of the database: its tables, and the scripts that take older versions to it."""

from __future__ import annotations

from typing import Final

APPLICATION_ID: Final = 0x436F6E76
"""`Conv` in ASCII: marks a SQLite file as Convoy's, also for file(1)."""

SCHEMA_VERSION: Final = 3
"""Stored in `PRAGMA user_version`. Version 1 had no table of targets and no application id; version 2 had no table of plans."""

SCHEMA: Final = """\
CREATE TABLE measurements (
  problem TEXT NOT NULL,
  engine TEXT NOT NULL,
  version INTEGER NOT NULL,
  knobs TEXT NOT NULL,
  target TEXT NOT NULL,
  protocol TEXT NOT NULL,
  status TEXT NOT NULL,
  samples INTEGER NOT NULL,
  median_us REAL NOT NULL,
  spread_us REAL NOT NULL,
  error REAL NOT NULL,
  workspace_bytes INTEGER NOT NULL,
  resident_bytes INTEGER NOT NULL,
  deterministic INTEGER NOT NULL,
  reason TEXT NOT NULL,
  versions TEXT NOT NULL,
  date TEXT NOT NULL,
  seal INTEGER NOT NULL,
  PRIMARY KEY (problem, target, protocol, engine, version, knobs)
);
CREATE TABLE texts (
  key TEXT PRIMARY KEY,
  text TEXT NOT NULL,
  seal INTEGER NOT NULL
);
CREATE TABLE targets (
  digest TEXT PRIMARY KEY,
  json TEXT NOT NULL,
  seal INTEGER NOT NULL
);
CREATE TABLE plans (
  key TEXT PRIMARY KEY,
  json TEXT NOT NULL,
  seal INTEGER NOT NULL
);
"""
"""Tables of the present version. STRICT is not used, because it needs SQLite 3.37; WITHOUT ROWID is not used, because
`damaged_tables` finds rows by rowid."""

MIGRATIONS: Final[tuple[str, ...]] = (
    f"""\
CREATE TABLE targets (
  digest TEXT PRIMARY KEY,
  json TEXT NOT NULL,
  seal INTEGER NOT NULL
);
PRAGMA application_id = {APPLICATION_ID};
""",
    """\
CREATE TABLE plans (
  key TEXT PRIMARY KEY,
  json TEXT NOT NULL,
  seal INTEGER NOT NULL
);
""",
)
"""`MIGRATIONS[i]` is the script that takes version i + 1 to version i + 2. It may append columns with a default (which no
seal notices), add tables and indices; it never changes or moves a column."""
