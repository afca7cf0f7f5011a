"""The difference of two runs as a sheet."""

from __future__ import annotations

from convoy.compare.runs.difference import MEMORY, Change, Difference
from convoy.compare.runs.rows import Figure
from convoy.compare.runs.run_page import foot
from convoy.compare.runs.runfile import Run
from convoy.report.sheet import Card, Cell, Section, Sheet, Table

_MARKS = {"regression": "bad", "broken": "bad", "improvement": "good", "mended": "good"}


def difference_sheet(changes: Difference, old: Run, new: Run, names: tuple[str, str] = ("", "")) -> Sheet:
    """The changes, worst first; both manifests at the foot.

    Args:
        changes: `difference(old, new)`.
        old: the older run.
        new: the newer run.
        names: their files.
    """
    bad = len(changes.regressions)
    cards = (
        Card(str(bad), "regressions beyond the spread" if bad != 1 else "regression beyond the spread", good=not bad),
        Card(str(changes.count("improvement")), "improvements"),
        Card(f"{changes.count('gone')} and {changes.count('new')}", "rows that are gone, and rows that are new"),
    )
    rows = tuple(_line(change) for change in changes.changes)
    table = Table(("row", "verdict", "metric", "before", "after", "times worse"), rows, numbers=(3, 4, 5))
    sections = (
        Section("Versions and devices that changed", changes.causes or ("None.",)),
        Section("Row by row", tables=(table,)),
    )
    runs = ((name, str(run.manifest.get("date", ""))) for name, run in zip(names, (old, new), strict=True))
    lead = " → ".join(filter(None, (" of ".join(filter(None, run)) for run in runs)))
    return Sheet(f"What changed: {new.kind}", lead, cards, sections, (foot(old, names[0]), foot(new, names[1])))


def _line(change: Change) -> tuple[Cell, ...]:
    figures = [_figure(change.metric, figure) for figure in (change.old, change.new)]
    worse = Cell(f"{change.worse:.2f}x", change.worse) if change.worse else Cell("")
    verdict = change.verdict + (f": {change.reason}" if change.reason else "")
    return (
        Cell(change.name),
        Cell(verdict, mark=_MARKS.get(change.verdict, "soft")),
        Cell(change.metric),
        *figures,
        worse,
    )


def _figure(metric: str, figure: Figure | None) -> Cell:
    """A figure's median; bytes in MiB."""
    if figure is None:
        return Cell("")
    text = f"{figure.p50 / (1 << 20):.1f} MiB" if metric in MEMORY else f"{figure.p50:.4g}"
    return Cell(text, figure.p50)
