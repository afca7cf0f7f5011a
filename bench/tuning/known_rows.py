"""Rows of one target by one protocol, from a database or from what ships with the package: for benchmarks that replay them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from convoy.measurement.protocol import protocol_for
from convoy.perfdb import Database, Measurement
from convoy.perfdb.shipped import read_shipped, shipped_descriptions
from convoy.problem import parse_problem
from convoy.settings import Effort
from convoy.target import Target
from convoy.tune.precision import depends_on_precision, equivalent_targets, reuse_rows


def measurements(db: Path | None, digest: str = "") -> tuple[Target, list[Measurement]]:
    """A target and its rows by the present protocol, failures included.

    Targets that differ in torch's precision settings count as one, for layers that do not heed them.

    Args:
        db: a database of one device; None: what ships.
        digest: of the target; by default the one with the most rows.
    """
    known, rows = _shipped() if db is None else _stored(db)
    rows = [row for row in rows if row.target in known and row.protocol == present(known[row.target])]
    counts = Counter(row.target for row in rows)
    target = known.get(digest or max(counts, key=counts.__getitem__)) if counts else None
    if target is None or target.digest not in counts:
        wanted = f"of the target {digest}" if digest else "of a described target"
        raise SystemExit(f"there are no rows {wanted} by the present protocol; there are: {_words(counts, known)}")
    kin = {twin.digest for twin in equivalent_targets(target, known.values())}
    if db is not None and counts.keys() - {target.digest, *kin}:
        raise SystemExit(f"--db: the rows are of several devices: {_words(counts, known)}; name one database for each")
    own = [row for row in rows if row.target == target.digest]
    others = [row for row in rows if row.target in kin and not _heeds(row.problem)]
    return target, reuse_rows(own, others, target)


def present(target: Target) -> str:
    """The protocol that rows of a target are measured by today."""
    return protocol_for(Effort.QUICK, target.device).id


def _shipped() -> tuple[dict[str, Target], list[Measurement]]:
    known = shipped_descriptions()
    return known, [row for digest in known for row in read_shipped(digest)]


def _stored(db: Path) -> tuple[dict[str, Target], list[Measurement]]:
    with Database.open(db, shipped=False, create=False) as database:
        return dict(database.targets()), database.rows()


def _words(counts: Iterable[str], known: dict[str, Target]) -> str:
    return ", ".join(f"{digest} ({known[digest].name})" for digest in counts) or "none"


def _heeds(key: str) -> bool:
    """Whether torch's precision settings may change what a problem takes; of a piece of the graph its key does not tell."""
    return key.startswith("subgraph:") or depends_on_precision(parse_problem(key, ""))
