"""Difference of two runs of one kind: slower, faster, newly failing or fixed rows, and changed versions. For use in CI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from convoy.compare.runs.predicted import has_predicted_layers, has_predicted_total
from convoy.compare.runs.rows import Figure, Row
from convoy.compare.runs.runfile import Run
from convoy.errors import InputError

TOTAL: Final = "total_us"
"""The sum of a strategy's steps, which may be predicted: it is then not judged."""

TIMES: Final = {
    "latency_ms": 1,
    "call_ms": 1,
    "replay_ms": 1,
    "step_ms": 1,
    "kernel_us": 1,
    "time_us": 1,
    TOTAL: 1,
    "images_per_s": -1,
    "efficiency": -1,
}
"""How time is told; 1: less is better, -1: more is better. A row's time is judged by the first that both runs have."""

MEMORY: Final = {"peak_memory_bytes": 1, "workspace_bytes": 1}
"""How memory is told; a row's memory is judged by the first that both runs have, whatever became of its time."""

TOLERANCE: Final = 0.05
"""A change of time below this share is none, whatever the spread: two runs of one program differ by as much."""

MEMORY_TOLERANCE: Final = 0.10
"""The same for memory, which is measured once and has no spread: libraries' resident memory differs from run to run."""

LEAST_BYTES: Final = 1 << 20
"""A change of memory below this is none, whatever its share: allocators hand out whole MiB."""


@dataclass(frozen=True, slots=True)
class Change:
    """One row in both runs, or in one.

    Attributes:
        name: the row, in words.
        verdict: `regression`, `improvement`, `same`, `broken` (was ok), `mended` (is ok now), `new`, `gone`, or `unjudged` (ok in
            both runs, but they have no figure in common).
        metric: compared quantity.
        old: the figure before, or None.
        new: the figure after, or None.
        worse: how many times worse it became (below 1: better); 0 where it cannot be said.
        reason: why it is not ok any more.
    """

    name: str
    verdict: str
    metric: str = ""
    old: Figure | None = None
    new: Figure | None = None
    worse: float = 0.0
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
            if self.worse == 0:
                return f"{self.name}: {self.metric} from {self.old.p50:.4g} to {self.new.p50:.4g}"
            more, less = ("more memory", "less memory") if self.metric in MEMORY else ("slower", "faster")
            how = f"{self.worse:.2f}x {more}" if self.worse >= 1 else f"{1 / self.worse:.2f}x {less}"
            return f"{self.name}: {how} ({self.metric} from {self.old.p50:.4g} to {self.new.p50:.4g})"
        said = {
            "broken": "does not work any more",
            "mended": "works now",
            "new": "is new",
            "gone": "is gone",
            "unjudged": "has no figure that both runs have",
        }
        return f"{self.name}: {said[self.verdict]}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, slots=True)
class Difference:
    """Two runs, compared.

    Attributes:
        causes: differences of the manifests: `cudnn 9.19.0 -> 9.20.0`.
        changes: row by row, the worst first.
    """

    causes: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Rows that became worse beyond the spread, or fail now."""
        return tuple(change for change in self.changes if change.bad)

    def lines(self) -> list[str]:
        """The causes, then each change that is one; each regression is named with the causes."""
        because = ", ".join(self.causes)
        found = [f"changed: {because}" if because else "changed: nothing that the manifests name"]
        told = [change for change in self.changes if change.verdict != "same"]
        found += [(f"{because}: " if because and change.bad else "") + change.words() for change in told]
        judged = sum(change.verdict in _JUDGED for change in self.changes)
        bad = len(self.regressions)
        counts = (
            f"{bad} regression{'s' if bad != 1 else ''}",
            f"{self.count('same')} of {judged} figures the same",
            f"rows gone: {self.count('gone')}",
            f"rows new: {self.count('new')}",
        )
        return [*found, ", ".join(counts)]

    def count(self, verdict: str) -> int:
        """How many changes have this verdict."""
        return sum(change.verdict == verdict for change in self.changes)


_JUDGED: Final = ("regression", "improvement", "same", "broken", "mended")
"""Verdicts on something that both runs have."""


def difference(
    old: Run, new: Run, tolerance: float = TOLERANCE, memory_tolerance: float = MEMORY_TOLERANCE
) -> Difference:
    """Compare two runs of one kind.

    A row's time has regressed where its median is worse by more than the larger spread of both and by more than `tolerance`.
    Layers that both rows tell of (a Convoy program's steps, time by layer kind) are compared likewise and named. Its memory has
    regressed where it is more by more than `memory_tolerance` and `LEAST_BYTES`.

    Args:
        old: the older run.
        new: the newer one.
        tolerance: share by which a time may be worse.
        memory_tolerance: share by which memory may be more.

    Raises:
        InputError: runs of two kinds, a tolerance below 0, or runs of which nothing can be compared: no row stands in both, or
            none that is ok in one of them and has a figure in common.
    """
    if old.kind != new.kind:
        raise InputError("--diff", f"{old.kind} and {new.kind}", "two runs of one kind")
    limits = {"--tolerance": tolerance, "--memory-tolerance": memory_tolerance}
    for name, share in limits.items():
        if not share >= 0:
            raise InputError(name, share, "a share of at least 0")
    changes: list[Change] = []
    rows = {row.key: row for row in new.rows}
    for before in old.rows:
        after = rows.pop(before.key, None)
        changes += _row_changes(before, after, tolerance, memory_tolerance)
    changes += [Change(_name(row), "new", reason="" if row.ok else row.status) for row in rows.values()]
    if not any(change.verdict in _JUDGED for change in changes):
        raise _incomparable(old, new, changes)
    order = ("broken", "regression", "mended", "improvement", "new", "gone", "unjudged", "same")
    changes.sort(key=lambda change: (order.index(change.verdict), -change.worse))
    return Difference(tuple(causes(old.manifest, new.manifest)), tuple(changes))


def _incomparable(old: Run, new: Run, changes: Sequence[Change]) -> InputError:
    """A net that was renamed must not pass for one without regressions."""
    gone, added = ([change.name for change in changes if change.verdict == verdict] for verdict in ("gone", "new"))
    shared = len(old.rows) - len(gone)
    told = f"{len(old.rows)} and {len(new.rows)} rows, {shared} in both, {len(gone)} gone, {len(added)} new"
    named = [f"{words}: {_few(names)}." for words, names in (("Gone", gone), ("New", added)) if names]
    return InputError("--diff", told, "a row in both runs that can be compared", " ".join(named))


def _few(names: Sequence[str]) -> str:
    return "; ".join(name[:200] for name in names[:3]) + ("; ..." if len(names) > 3 else "")


def causes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences of the manifests: device, versions, clocks, commit, protocol."""
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


def _row_changes(before: Row, after: Row | None, tolerance: float, memory_tolerance: float) -> list[Change]:
    name = _name(before)
    if after is None:
        return [Change(name, "gone")]
    if not before.ok or not after.ok:
        if before.ok:
            return [Change(name, "broken", reason=f"{after.status}: {after.reason}"[:400])]
        return [Change(name, "mended")] if after.ok else []
    found: list[Change] = []
    for metrics, share, least in ((TIMES, tolerance, 0), (MEMORY, memory_tolerance, LEAST_BYTES)):
        change = _judge(name, before, after, metrics, share, least)
        if change is None:
            continue
        found.append(change)
        if metrics is TIMES and change.verdict == "regression":
            found += _layer_changes(name, before, after, tolerance)
    why = "its time is predicted, not measured" if _rests_on_predictions(before, after) else ""
    return found or [Change(name, "unjudged", reason=why)]


def _rests_on_predictions(before: Row, after: Row) -> bool:
    return has_predicted_total(before) or has_predicted_total(after)


def _judge(
    name: str, before: Row, after: Row, metrics: Mapping[str, int], tolerance: float, least: float
) -> Change | None:
    """The verdict on the first of some metrics that both rows have; None where there is none.

    Args:
        name: the row, in words.
        before: the older row.
        after: the newer one.
        metrics: their names, with 1 where less is better and -1 where more is.
        tolerance: share by which the figure may be worse.
        least: by how much it may be worse in any case, in the metric's unit.
    """
    for metric, sign in metrics.items():
        old, new = before.figure(metric), after.figure(metric)
        if old is None or new is None or (metric == TOTAL and _rests_on_predictions(before, after)):
            continue
        worse_by = (new.p50 - old.p50) * sign
        margin = max(old.spread, new.spread, tolerance * abs(old.p50), least)
        worse = (new.p50 / old.p50) ** sign if old.p50 > 0 and new.p50 > 0 else 0.0
        verdict = "regression" if worse_by > margin else "improvement" if -worse_by > margin else "same"
        return Change(name, verdict, metric, old, new, worse)
    return None


def _layer_changes(name: str, before: Row, after: Row, tolerance: float) -> list[Change]:
    """Which layers, or layer kinds, of a row that regressed became slower: they have no spread of their own, so 10 % at least."""
    found: list[Change] = []
    for unit, old, new in (("us", _layers(before), _layers(after)), ("ms", _kinds(before), _kinds(after))):
        total = sum(old.values())
        for layer in old.keys() & new.keys():
            if new[layer] - old[layer] > max(2 * tolerance * old[layer], 0.02 * total):
                first, second = (Figure.once(unit, unit, times[layer]) for times in (old, new))
                worse = new[layer] / old[layer] if old[layer] else 0.0
                found.append(Change(f"{name}: {layer}", "regression", unit, first, second, worse))
    return found


def _layers(row: Row) -> dict[str, float]:
    layers = row.detail.get("layers", [])
    return {str(layer["name"]): float(layer["median_us"]) for layer in layers if not layer.get("predicted")}


def _kinds(row: Row) -> dict[str, float]:
    kinds: Mapping[str, Any] = {} if has_predicted_layers(row) else row.detail.get("kinds", {})
    return {str(name): float(ms) for name, ms in kinds.items()}


def _name(row: Row) -> str:
    return f"{row.label()}, {row.provider}"
