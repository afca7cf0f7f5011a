"""Two runs of one kind: what became slower, faster, broken or whole, and which versions changed in between. For use in CI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from convoy.compare.runfile import Figure, Row, Run
from convoy.errors import InputError

METRICS: Final = {
    "latency_ms": 1,
    "step_ms": 1,
    "kernel_us": 1,
    "time_us": 1,
    "total_us": 1,
    "images_per_s": -1,
    "efficiency": -1,
    "peak_memory_bytes": 1,
    "workspace_bytes": 1,
}
"""What is compared; 1: less is better, -1: more is better. A row is judged by the first that both runs have."""

TOLERANCE: Final = 0.05
"""A change below this share is none, whatever the spread: two runs of one program differ by as much."""


@dataclass(frozen=True, slots=True)
class Change:
    """One row in both runs, or in one.

    Attributes:
        name: the row, in words.
        verdict: `regression`, `improvement`, `same`, `broken` (was ok), `mended` (is ok now), `new` or `gone`.
        metric: what was compared.
        old: the figure before, or None.
        new: the figure after, or None.
        slower: how many times worse it became (below 1: better); 0 where it cannot be said.
        reason: why it is not ok any more.
    """

    name: str
    verdict: str
    metric: str = ""
    old: Figure | None = None
    new: Figure | None = None
    slower: float = 0.0
    reason: str = ""

    @property
    def bad(self) -> bool:
        """Whether it should stop a change from being taken."""
        return self.verdict in ("regression", "broken")

    def words(self) -> str:
        """One line."""
        if self.verdict in ("regression", "improvement", "same"):
            assert self.old is not None
            assert self.new is not None
            if self.slower == 0:
                return f"{self.name}: {self.metric} from {self.old.p50:.4g} to {self.new.p50:.4g}"
            how = f"{self.slower:.2f}x slower" if self.slower >= 1 else f"{1 / self.slower:.2f}x faster"
            return f"{self.name}: {how} ({self.metric} from {self.old.p50:.4g} to {self.new.p50:.4g})"
        said = {"broken": "does not work any more", "mended": "works now", "new": "is new", "gone": "is gone"}
        return f"{self.name}: {said[self.verdict]}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, slots=True)
class Difference:
    """Two runs, compared.

    Attributes:
        causes: what is another in the manifest: `cudnn 9.19.0 -> 9.20.0`.
        changes: row by row, the worst first.
    """

    causes: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """What became worse beyond the spread, or broke."""
        return tuple(change for change in self.changes if change.bad)

    def lines(self) -> list[str]:
        """The causes, then each change that is one; each regression is named with the causes."""
        because = ", ".join(self.causes)
        found = [f"changed: {because}" if because else "changed: nothing that the manifests name"]
        told = [change for change in self.changes if change.verdict != "same"]
        found += [(f"{because}: " if because and change.bad else "") + change.words() for change in told]
        same = sum(change.verdict == "same" for change in self.changes)
        return [*found, f"{len(self.regressions)} regressions, {same} of {len(self.changes)} rows the same"]


def difference(old: Run, new: Run, tolerance: float = TOLERANCE) -> Difference:
    """Compare two runs of one kind.

    A row has regressed where its median is worse by more than the larger spread of both and by more than `tolerance`. Layers
    that both rows tell of (a Convoy program's steps, time by layer kind) are compared likewise and named.

    Raises:
        InputError: runs of two kinds, or a tolerance below 0.
    """
    if old.kind != new.kind:
        raise InputError("--diff", f"{old.kind} and {new.kind}", "two runs of one kind")
    if not tolerance >= 0:
        raise InputError("--tolerance", tolerance, "a share of at least 0")
    changes: list[Change] = []
    rows = {row.key: row for row in new.rows}
    for before in old.rows:
        after = rows.pop(before.key, None)
        changes += _row_changes(before, after, tolerance)
    changes += [Change(_name(row), "new", reason="" if row.ok else row.status) for row in rows.values()]
    order = ("broken", "regression", "mended", "improvement", "new", "gone", "same")
    changes.sort(key=lambda change: (order.index(change.verdict), -change.slower))
    return Difference(tuple(causes(old.manifest, new.manifest)), tuple(changes))


def causes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What the manifests have another of: device, versions, clocks, commit, protocol."""
    found: list[str] = []
    for label, before, after in (
        ("device", old.get("target", {}).get("name", ""), new.get("target", {}).get("name", "")),
        ("threads", old.get("target", {}).get("units", ""), new.get("target", {}).get("units", "")),
        *(_versions(old.get("versions", {}), new.get("versions", {}))),
        ("commit", old.get("commit", ""), new.get("commit", "")),
        ("protocol", old.get("protocol", ""), new.get("protocol", "")),
    ):
        if before != after:
            found.append(f"{label} {before or 'none'} -> {after or 'none'}")
    return found


def _versions(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str, str]]:
    return [(name, old.get(name, ""), new.get(name, "")) for name in sorted({*old, *new})]


def _row_changes(before: Row, after: Row | None, tolerance: float) -> list[Change]:
    name = _name(before)
    if after is None:
        return [Change(name, "gone")]
    if not before.ok or not after.ok:
        if before.ok:
            return [Change(name, "broken", reason=f"{after.status}: {after.reason}"[:400])]
        return [Change(name, "mended")] if after.ok else []
    for metric, sign in METRICS.items():
        old, new = before.figure(metric), after.figure(metric)
        if old is not None and new is not None:
            whole = _judge(name, metric, old, new, sign, tolerance)
            layers = _layer_changes(name, before, after, tolerance) if whole.verdict == "regression" else []
            return [whole, *layers]
    return []


def _judge(name: str, metric: str, old: Figure, new: Figure, sign: int, tolerance: float) -> Change:
    worse_by = (new.p50 - old.p50) * sign
    margin = max(old.spread, new.spread, tolerance * abs(old.p50))
    slower = 0.0
    if old.p50 > 0 and new.p50 > 0:
        slower = (new.p50 / old.p50) ** sign
    verdict = "regression" if worse_by > margin else "improvement" if -worse_by > margin else "same"
    return Change(name, verdict, metric, old, new, slower)


def _layer_changes(name: str, before: Row, after: Row, tolerance: float) -> list[Change]:
    """Which layers, or layer kinds, of a row that regressed became slower: they have no spread of their own, so 10 % at least."""
    found: list[Change] = []
    for unit, old, new in (("us", _layers(before), _layers(after)), ("ms", _kinds(before), _kinds(after))):
        total = sum(old.values())
        for layer in old.keys() & new.keys():
            if new[layer] - old[layer] > max(2 * tolerance * old[layer], 0.02 * total):
                pair = (Figure.once(unit, unit, times[layer]) for times in (old, new))
                slower = new[layer] / old[layer] if old[layer] else 0.0
                found.append(Change(f"{name}: {layer}", "regression", unit, *pair, slower))
    return found


def _layers(row: Row) -> dict[str, float]:
    return {str(layer["name"]): float(layer["median_us"]) for layer in row.detail.get("layers", [])}


def _kinds(row: Row) -> dict[str, float]:
    return {str(name): float(ms) for name, ms in row.detail.get("kinds", {}).items()}


def _name(row: Row) -> str:
    return f"{row.label()}, {row.provider}"
