"""Sheet: a page of tables and pictures as data, for the terminal and as one self-contained HTML file (`convoy report`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

from convoy.plan.describe import PREDICTED
from convoy.report.html import page
from convoy.report.tables import console, print_table
from convoy.untrusted import escape_controls

SERIES: Final = 9
"""Colours that the style has for parts of a bar."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar: its share of the whole width, its colour's number, and its tooltip."""

    share: float
    colour: int
    title: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One field of a table.

    Attributes:
        text: shown text.
        value: sort key, where that is a number.
        mark: `good`, `bad` or `soft`: how it is set; empty: as it is.
        bar: parts of a bar that stands for the text on the page; the terminal shows the text.
        spread: from and to, as shares of the width: a line over the bar.
    """

    text: str
    value: float | None = None
    mark: str = ""
    bar: tuple[Part, ...] = ()
    spread: tuple[float, float] | None = None

    @property
    def picture(self) -> str:
        """The bar as SVG, in percent of its field's width, so that it fits on any screen."""
        drawn: list[str] = []
        start = 0.0
        for part in self.bar:
            share = max(0.0, min(part.share, 1.0 - start))
            drawn.append(
                f'<rect class="s{part.colour % SERIES}" x="{start * 100:.2f}%" y="3" width="{share * 100:.2f}%" height="12">'
                f"<title>{escape(part.title)}</title></rect>"
            )
            start += share
        if self.spread is not None:
            low, high = (max(0.0, min(1.0, side)) * 100 for side in self.spread)
            drawn.append(f'<line class="spread" x1="{low:.2f}%" x2="{high:.2f}%" y1="9" y2="9"/>')
        label = escape(self.text or "; ".join(part.title for part in self.bar))
        return f'<svg class="bar" height="18" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


@dataclass(frozen=True, slots=True)
class Table:
    """A table that sorts.

    Attributes:
        heads: names of the columns.
        rows: fields, as many in each row.
        caption: of the table.
        numbers: columns that are set to the right.
        page_only: columns that the terminal leaves out.
        under: a column of long texts, which the page sets under each row, over the table's whole width.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    numbers: tuple[int, ...] = ()
    page_only: tuple[int, ...] = ()
    under: int | None = None

    @property
    def beside(self) -> tuple[int, ...]:
        """The columns that the page sets side by side."""
        return tuple(index for index in range(len(self.heads)) if index != self.under)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with lines of text, tables and pictures (SVG).

    Attributes:
        title: the heading.
        lines: text, a paragraph each.
        about: text on the pictures, for the page alone, as they are.
        tables: under the text.
        pictures: SVG, under the tables.
        legend: names of the colours of the tables' bars.
        terminal: lines for the terminal alone, in place of columns that are for the page.
    """

    title: str
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[str, ...] = ()
    legend: tuple[str, ...] = ()
    terminal: tuple[str, ...] = ()
    about: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Card:
    """One figure that is read first."""

    figure: str
    words: str
    good: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """A whole page.

    Attributes:
        title: its heading.
        lead: a line under it.
        cards: the figures that are read first.
        sections: the rest.
        manifests: for each run, (name, value) pairs for the foot.
        parts: the pages of several runs, one after another, each with a title of its own.
    """

    title: str
    lead: str = ""
    cards: tuple[Card, ...] = ()
    sections: tuple[Section, ...] = ()
    manifests: tuple[tuple[tuple[str, str], ...], ...] = field(default_factory=tuple)
    parts: tuple[Sheet, ...] = ()


def write_sheet(sheet: Sheet, path: Path) -> None:
    """Write the page, whole or not at all; raises InputError where the path cannot be written."""
    from convoy.plan.file import write_text

    write_text(path, render_sheet(sheet), "report")


def render_sheet(sheet: Sheet) -> str:
    """The page as text: no network, strings escaped, a policy that lets in its own style and script alone."""
    return page("sheet.html", {"sheet": sheet}, ("report.css", "sheet.css"))


def print_sheet(sheet: Sheet) -> None:
    """The same for the terminal: text and tables; sections and tables that are for the page alone are left out."""
    for part in sheet.parts:
        console().print(f"\n== {_plain(part.title)} ==", markup=False, soft_wrap=True)
        print_sheet(part)
    for section in sheet.sections:
        tables = [(table, shown) for table in section.tables if (shown := _on_terminal(table))]
        if not (tables or section.terminal or section.lines):
            continue
        console().print(f"\n{_plain(section.title)}", markup=False)
        for table, shown in tables:
            if table.caption:
                console().print(f"\n{_plain(table.caption)}", markup=False)
            numbers = [shown.index(index) for index in table.numbers if index in shown]
            rows = [[_plain(row[index].text) for index in shown] for row in table.rows]
            print_table([table.heads[index] for index in shown], rows, numbers=numbers)
        for line in (*section.terminal, *section.lines):
            console().print(_plain(line), markup=False, soft_wrap=True)


def _on_terminal(table: Table) -> list[int]:
    """The columns that a terminal shows."""
    return [index for index in range(len(table.heads)) if index not in table.page_only]


def _plain(text: str) -> str:
    """One line for a terminal: control sequences in frameworks' messages are escaped."""
    return escape_controls(text.replace("\n", " ").replace("\t", " "))


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Table:
    """A table from texts; a column of numbers sorts by them."""
    cells = [
        tuple(Cell(text, _number(text) if index in numbers else None) for index, text in enumerate(row)) for row in rows
    ]
    return Table(tuple(heads), tuple(cells), numbers=tuple(numbers))


def _number(text: str) -> float | None:
    try:
        return float(text.removeprefix(PREDICTED).rstrip("x% ").replace(",", ""))
    except ValueError:
        return None
