"""Fair comparisons of whole nets: like with like, peers at their best, one commit at a time; a gain within the spread is none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.shared.rows import Row, Setting, geometric_mean

KINDS = {"replay_ms": "replay", "call_ms": "call", "latency_ms": "latency"}
"""Metrics and their words: the device's work alone, calls back to back, one call and a wait."""

OURS = "convoy"


@dataclass(frozen=True, slots=True)
class FairCase:
    """One net, dtype and batch by one metric.

    Attributes:
        ours: Convoy's row, of its own process where there is one.
        best: the fastest right peer's row; each peer counts with the better of its own process and the common one.
    """

    ours: Row
    best: Row

    @property
    def gain(self) -> float:
        """How many times as fast as the best peer."""
        return float(self.best["p50"]) / float(self.ours["p50"])

    @property
    def level(self) -> bool:
        """Whether the difference is smaller than the spread of the two."""
        return abs(self.gain - 1) <= max(_spread(self.ours), _spread(self.best))

    @property
    def words(self) -> str:
        """The gain for people."""
        return f"{self.gain:.2f}x" + (" (level)" if self.level else "")


def newest_commit(rows: Sequence[Row]) -> list[Row]:
    """The rows of the commit that was measured last: rows of two commits are never compared."""
    newest = max(rows, key=lambda row: row["date"])["commit"]
    return [row for row in rows if row["commit"] == newest]


def by_commit(rows: Sequence[Row]) -> list[list[Row]]:
    """The newest commit's rows, then each other commit's that has the same digest of code (`timed_code`)."""
    newest = newest_commit(rows)
    code = newest[0].get("code", "")
    dates: dict[str, str] = {}
    for row in rows:
        if code and row.get("code", "") == code and row["commit"] != newest[0]["commit"]:
            dates[row["commit"]] = max(row["date"], dates.get(row["commit"], ""))
    others = sorted(dates, key=lambda commit: dates[commit], reverse=True)
    return [newest, *([row for row in rows if row["commit"] == commit] for commit in others)]


def by_older_code(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each commit of older code, newest first, without the cases of newer rows. Each has at least one fair case."""
    newest = by_commit(rows)
    known = {_case(row) for own in newest for row in own}
    commits = {row["commit"] for own in newest for row in own}
    dates = {row["commit"]: row["date"] for row in rows if row["commit"] not in commits}
    found: list[list[Row]] = []
    for commit in sorted(dates, key=lambda commit: dates[commit], reverse=True):
        own = [row for row in rows if row["commit"] == commit and _case(row) not in known]
        if any(fair_cases(own, metric) for metric in KINDS):
            found.append(own)
            known |= {_case(row) for row in own}
    return found


def _case(row: Row) -> Setting:
    return row["subject"], row["dtype"], row["batch"]


def newest_cases(rows: Sequence[Row], metric: str) -> dict[Setting, FairCase]:
    """The cases of the newest code; each is of one commit, the newest that has it."""
    found: dict[Setting, FairCase] = {}
    for own in by_commit(rows):
        found = {**fair_cases(own, metric), **found}
    return found


def fair_cases(rows: Sequence[Row], metric: str) -> dict[Setting, FairCase]:
    """Cases in which Convoy and a peer have right figures, in order of dtype, batch and net.

    Args:
        rows: of one commit.
        metric: one of `KINDS`.
    """
    sides: dict[Setting, dict[str, Row]] = {}
    for row in rows:
        if row["metric"] != metric or row["ok"] != "true" or math.isnan(float(row["p50"])):
            continue
        own = sides.setdefault((row["subject"], row["dtype"], row["batch"]), {})
        if row["provider"] == OURS:
            if OURS not in own or row.get("processes") == "own":
                own[OURS] = row
        elif not row["provider"].startswith(f"{OURS}."):
            best = own.get("best")
            if best is None or float(row["p50"]) < float(best["p50"]):
                own["best"] = row
    found = {case: FairCase(own[OURS], own["best"]) for case, own in sides.items() if {OURS, "best"} <= own.keys()}
    return {case: found[case] for case in sorted(found, key=lambda case: (case[1], int(case[2]), case[0]))}


def means(cases: Mapping[Setting, FairCase]) -> dict[str, tuple[float, float, int]]:
    """Geometric mean of the gain, the least gain and the number of nets, by dtype and batch."""
    groups: dict[str, list[float]] = {}
    for (_, dtype, batch), case in cases.items():
        groups.setdefault(f"{dtype}, batch {batch}", []).append(case.gain)
    return {name: (geometric_mean(gains), min(gains), len(gains)) for name, gains in groups.items()}


def _spread(row: Row) -> float:
    """Half the distance from the 20th to the 80th percentile, as a share of the median."""
    return (float(row["p80"]) - float(row["p20"])) / 2 / float(row["p50"])


def before_replays(rows: Sequence[Row]) -> list[Row]:
    """The rows of commits that timed one figure a provider, not replays and calls apart: never in a table with those."""
    fair = {row["commit"] for row in rows if row["metric"] in KINDS and row["metric"] != "latency_ms"}
    return [row for row in rows if row["commit"] not in fair]
