"""docs/concepts/database.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from convoy.cli.commands.db import app
from convoy.perfdb import Status, sql
from convoy.perfdb.location import FILE_NAME
from convoy.perfdb.record import COLUMNS, KEY_COLUMNS

PAGE = (Path(__file__).parents[3] / "docs" / "concepts" / "database.md").read_text(encoding="utf-8")


def test_the_schema_is_the_codes() -> None:
    (block,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    assert block == sql.SCHEMA
    assert f"## The schema, version {sql.SCHEMA_VERSION}\n" in PAGE
    assert f"0x{sql.APPLICATION_ID:X}" in PAGE


def test_every_column_is_described_with_its_type() -> None:
    described = re.findall(r"^\| `(\w+)` \| (text|integer|real|boolean) \|", PAGE, re.MULTILINE)
    words = {str: "text", int: "integer", float: "real", bool: "boolean"}
    assert described == [(name, words[kind]) for name, kind in COLUMNS.items()]
    (status,) = re.findall(r"^\| `status` .*", PAGE, re.MULTILINE)
    assert all(f"`{word}`" in status for word in Status)


def test_keys_commands_and_the_file_are_named() -> None:
    for name in KEY_COLUMNS:
        assert f"`{name}`" in PAGE.split("The key of a row is")[1].split(". A row")[0]
    commands = {c.name or c.callback.__name__ for c in app.registered_commands}  # type: ignore[union-attr]
    assert set(re.findall(r"^    convoy db (\w+)", PAGE, re.MULTILINE)) == commands
    assert FILE_NAME in PAGE
