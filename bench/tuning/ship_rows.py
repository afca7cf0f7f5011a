"""Add a database's rows to those that ship with the package.

    python bench/tuning/ship_rows.py DB [--target DIGEST] [--all]

A row takes the place of a shipped one of the same problem, protocol and config. Rows of a target that ships nothing yet are left
out, unless `--all` is given. Run `make reference` afterwards: a page counts the shipped rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from convoy.perfdb import Database, Measurement
from convoy.perfdb.shipped import read_shipped, shipped_descriptions, shipped_folder, shipped_targets, write_shipped


def merged(shipped: Iterable[Measurement], new: Iterable[Measurement]) -> list[Measurement]:
    """All rows; of two with one problem, protocol and config the new one."""
    return list({(row.problem, row.protocol, row.config, row.target): row for row in (*shipped, *new)}.values())


def main() -> None:
    """Rewrite the files of the targets that the database has rows of, and say how many rows each got."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("db", type=Path)
    parser.add_argument("--target", default="", help="digest; by default all")
    parser.add_argument("--all", action="store_true", help="targets that ship nothing yet as well")
    options = parser.parse_args()
    with Database.open(options.db, shipped=False, create=False) as database:
        rows = database.rows(target=options.target)
        described = {row.target: database.target(row.target) for row in rows}
    known = {digest: target for digest, target in described.items() if target is not None}
    folder = Path(str(shipped_folder()))
    for digest in sorted(described):
        if digest not in shipped_targets() and not options.all:
            print(f"{digest}: left out, for nothing ships for it")
            continue
        before = read_shipped(digest) if digest in shipped_targets() else []
        found = merged(before, (row for row in rows if row.target == digest))
        write_shipped(found, folder, shipped_descriptions() | known)
        print(f"{digest}: {len(found) - len(before)} rows more, {len(found)} in all")


if __name__ == "__main__":
    main()
