"""The difference of two runs as a sheet."""

from __future__ import annotations

from convoy.compare.runs.difference import Change, Difference
from convoy.compare.runs.run_page import foot
from convoy.compare.runs.runfile import Run
from convoy.report.sheet import Card, Cell, Section, Sheet, Table

_MARKS = {"regression": "bad", "broken": "bad", "improvement": "good", "mended": "good"}


def difference_sheet(changes: Difference, old: Run, new: Run) -> Sheet:
    """The changes, worst first; both manifests at the foot."""
    bad = len(changes.regressions)
    cards = (
        Card(str(bad), "regressions beyond the spread" if bad != 1 else "regression beyond the spread", good=not bad),
        Card(str(changes.count("improvement")), "improvements"),
        Card(f"{changes.count('gone')} and {changes.count('new')}", "rows that are gone, and new"),
    )
    rows = tuple(_line(change) for change in changes.changes)
    table = Table(("what", "verdict", "metric", "before", "after", "worse"), rows, numbers=(3, 4, 5))
    sections = (
        Section("Changed in the manifest", changes.causes or ("nothing",)),
        Section("Row by row", tables=(table,)),
    )
    dates = " -> ".join(str(run.manifest.get("date", "?")) for run in (old, new))
    return Sheet(f"What changed: {new.kind}", dates, cards, sections, (foot(old), foot(new)))


def _line(change: Change) -> tuple[Cell, ...]:
    figures = [Cell(f"{f.p50:.4g}", f.p50) if f is not None else Cell("") for f in (change.old, change.new)]
    worse = Cell(f"{change.worse:.2f}x", change.worse) if change.worse else Cell("")
    verdict = change.verdict + (f": {change.reason}" if change.reason else "")
    return (
        Cell(change.name),
        Cell(verdict, mark=_MARKS.get(change.verdict, "soft")),
        Cell(change.metric),
        *figures,
        worse,
    )
