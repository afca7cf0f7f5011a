"""Results of an options run, as cards and sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from convoy.compare.compare_page import cell_of, percentiles
from convoy.compare.options.option_advice import Headline
from convoy.compare.runs.rows import Row, questions
from convoy.compare.runs.runfile import Run
from convoy.report.sheet import Card, Cell, Part, Section, Table


def sections_of(run: Run) -> tuple[list[Card], list[Section]]:
    """The speed-up of the best options, and for each question a table of each role."""
    cards: list[Card] = []
    sections: list[Section] = []
    for rows in questions(run.rows):
        summary = next((row for row in rows if row.detail.get("role") == "best" and row.ok), None)
        defaults = next((row for row in rows if _role(row, "defaults") and row.ok), None)
        headline = Headline.of(defaults, summary) if defaults is not None and summary is not None else None
        if headline is not None:
            cards.append(Card(headline.factor, f"{rows[0].label()}: {headline.words}", good=headline.gain > 1))
        advice = (str(summary.detail["advice"]),) if summary is not None else ()
        tables = tuple(
            options_table(rows, role, words) for role, words in ROLES.items() if any(_role(r, role) for r in rows)
        )
        failed = tuple(f"defaults: {row.status}: {row.reason}" for row in rows if _role(row, "defaults") and not row.ok)
        sections.append(Section(f"Options of PyTorch: {rows[0].label()}", (*failed, *advice), tables, about=(TERMS,)))
    return cards, sections


TERMS: Final = (
    "over defaults: the latency of the defaults over this one, both from the same rounds. worth: how many times faster the option"
    " makes the setting that it is added to; of the best setting: how many times slower it is without the option."
    " error: relative L2 error against float64."
)
"""What the columns mean, for the page."""

ROLES: Final = {
    "alone": "Each option alone, against the defaults",
    "forward": "Step by step from the defaults to the best setting",
    "without": "The best setting without one of its options",
    "default": "Options that are on by default, turned off",
    "loader": "Data-loader workers: the best training step fed by so many",
}
"""Role of a row in an options run, and its table's caption."""

OPTION_HEADS: Final = (
    "option", "latency ms", "+-", "20 %", "80 %", "latency", "defaults ms", "over defaults", "worth", "error",
    "status, setting",
)  # fmt: skip


def options_table(rows: Sequence[Row], role: str, caption: str) -> Table:
    """A line for each setting of one role, with the defaults and the best for comparison."""
    own = [row for row in rows if _role(row, role)]
    if role in ("alone", "forward"):
        own = [row for row in rows if _role(row, "defaults")] + own
    if role in ("without", "default"):
        own = [row for row in rows if _role(row, "best")] + own
    most = max((f.p80 for row in own if (f := row.figure("latency_ms")) is not None), default=1.0)
    lines = [_option(row, most) for row in own]
    hidden = (
        (3, 4, 5) if any(not row.ok for row in own) else (3, 4, 5, 10)
    )  # on a terminal a long setting hides the figures
    return Table(OPTION_HEADS, tuple(lines), caption, numbers=(1, 2, 3, 4, 6, 7, 8, 9), page_only=hidden)


def _role(row: Row, role: str) -> bool:
    return row.detail.get("role") == role


def _option(row: Row, most: float) -> tuple[Cell, ...]:
    latency = row.figure("latency_ms")
    name = str(row.detail.get("option", row.provider))
    if latency is None:
        return (Cell(name), Cell(row.status, mark="bad"), *(Cell(""),) * 8, Cell(row.reason, mark="soft"))
    gain, worth, stock = (row.detail.get(name) for name in ("gain", "worth", "defaults_ms"))
    kept = bool(row.detail.get("kept"))
    said = f"{name}: {latency.p50:.3f} ms"
    return (
        Cell(name),
        Cell(f"{latency.p50:.3f}", latency.p50),
        Cell(f"{latency.spread:.3f}" + (" noisy" if row.noisy else ""), latency.spread, "bad" if row.noisy else "soft"),
        *percentiles(latency),
        Cell("", latency.p50, bar=(Part(latency.p50 / most, 2 if kept else 7, said),),
             spread=(latency.p20 / most, latency.p80 / most)),
        Cell(f"{stock:.3f}", stock, "soft") if stock else Cell(""),
        Cell(f"{gain:.2f}x", gain) if gain else Cell(""),
        Cell(f"{worth:.2f}x", worth, "good" if kept else "") if worth else Cell(""),
        cell_of(row, "rel_l2_error", ".0e"),
        Cell(row.setting, mark="soft"),
    )  # fmt: skip
