"""Which rows predictions use, and which of them come first: those of the device, then those of devices with the same cores.

For a CPU, rows of all other CPUs follow, those with the same instruction set first. Their times are scaled by threads and vector
registers (`Target.time_factor`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from convoy.perfdb.row import Measurement
from convoy.perfdb.shipped import ShippedTables
from convoy.perfdb.shipped_table import ShippedTable
from convoy.perfdb.time_columns import NO_TIMES, TimeColumns
from convoy.problem import is_subgraph_key
from convoy.target import Target


def related_times(
    target: Target,
    described: Mapping[str, Target],
    protocols: Sequence[str],
    own_rows: Callable[[str], Sequence[Measurement]],
    shipped: ShippedTables | None,
) -> TimeColumns:
    """Times of a target and its relatives, in the order that `Database.times` says.

    Args:
        target: the device.
        described: the described targets, by digest.
        protocols: protocol ids, the preferred one first.
        own_rows: the user's good rows of a target's digest.
        shipped: the tables that ship; None: they are not used.
    """
    parts: list[TimeColumns] = []
    known: set[str] = set()
    for digests in _related_digests(target, described):
        own = [row for digest in digests for row in own_rows(digest)]
        factor = described[digests[0]].time_factor(target) if digests and digests[0] in described else 1.0
        for protocol in protocols:
            new = [row for row in own if row.protocol == protocol and _is_new_layer(known, row.problem)]
            found = [TimeColumns.of(new)] if new else []
            found += _shipped_times(shipped, digests, partial(ShippedTable.times, protocol=protocol, known=known))
            parts += found if factor == 1.0 else [part.scaled(factor) for part in found]
            known = known.union(*(part.measured_problems() for part in found))
    return TimeColumns.joined(parts)


def _shipped_times(
    shipped: ShippedTables | None, digests: Sequence[str], ask: Callable[[ShippedTable], TimeColumns]
) -> list[TimeColumns]:
    return [] if shipped is None else [shipped.query(digest, ask, NO_TIMES) for digest in digests]


def _related_digests(target: Target, described: Mapping[str, Target]) -> list[Sequence[str]]:
    """Digests of this target and of the same device's, then of the devices with the same cores, then of each other CPU."""
    like = [digest for digest, found in described.items() if found.is_same_device(target)]
    same = list(dict.fromkeys((target.digest, *like)))
    alike = [digest for digest, found in described.items() if found.has_same_cores(target) and digest not in same]
    others = [digest for digest, found in described.items() if found.predicts(target) and digest not in (*same, *alike)]
    others.sort(key=lambda digest: described[digest].arch != target.arch)
    return [same, alike, *([digest] for digest in others)]


def _is_new_layer(known: Collection[str], problem: str) -> bool:
    return problem not in known and not is_subgraph_key(problem)
