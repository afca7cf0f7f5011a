"""Reads another database for a merge."""

from __future__ import annotations

import json
from pathlib import Path

from convoy.errors import InputError
from convoy.perfdb.faults import ForeignFileError
from convoy.perfdb.location import checked_path
from convoy.perfdb.repair import read_contents
from convoy.perfdb.transfer import ImportBatch
from convoy.untrusted import escape_controls


def read_database(path: Path, own: Path | None) -> ImportBatch:
    """All rows, texts and targets of the database at `path`, each of them checked; the file is only read.

    Args:
        path: the other database.
        own: this database's own file, which is refused as input; None: it is in memory.

    Raises:
        InputError: there is no performance database at `path`.
    """
    source = checked_path(path)
    try:
        same = own is not None and own.exists() and source.samefile(own)
        if same or not source.is_file() or not source.stat().st_size:
            raise InputError("file", str(path), "another performance database")
        contents = read_contents(source)
    except (ForeignFileError, OSError) as error:
        raise InputError(
            "file", str(path), "a performance database", f"Reason: {escape_controls(str(error), one_line=True)}."
        ) from None
    if contents.damage and not contents.records:
        raise InputError("file", str(path), "a performance database", f"Reason: {contents.damage}.")
    incoming = ImportBatch()
    if contents.damage:
        incoming.refuse(0, f"the file is damaged: {contents.damage}")
    for number, record in enumerate(contents.records, 1):
        incoming.take(number, "measurements", record)
    for key, text in contents.texts.items():
        incoming.take(0, "texts", {"key": key, "text": text})
    for digest, text in contents.targets.items():
        incoming.take(0, "targets", {"digest": digest, "json": json.loads(text)})
    return incoming
