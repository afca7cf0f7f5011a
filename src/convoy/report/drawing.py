"""What every chart of a page is drawn with: text, layer names in two lines, legends, and a drawing for pages and for phones.

A chart is one SVG with a fixed number of pixels in its width, which a page scales. Scaled to a phone the text of a wide chart
is unreadable, so each chart is drawn twice, and the style shows the one that fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

WIDE: Final = 880
"""Pixels of a chart on a page; shown from 760 pixels up, where its text has at least 9."""

NARROW: Final = 350
"""Pixels of a chart on a phone."""

LINE: Final = 15
"""Pixels from one line of text to the next."""

ELLIPSIS: Final = "…"


def for_widths(draw: Callable[[int], str]) -> str:
    """A chart drawn for a page and for a phone; empty where there is nothing to draw."""
    return draw(WIDE) + draw(NARROW)


def open_svg(width: int, height: float, title: str) -> str:
    """The beginning of a chart, with its name for screen readers."""
    kind, said = "narrow" if width < WIDE else "wide", escape(title)
    return f'<svg class="{kind}" viewBox="0 0 {width} {height:g}" role="img" aria-label="{said}"><title>{said}</title>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """One line of text; `kind` is its class, `anchor` is `start`, `middle` or `end`."""
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """A list of (class of the mark, words); a class that begins with `dot` is drawn as a dot, others as a square."""
    items: list[str] = []
    for kind, words in entries:
        shape = (
            '<circle cx="6" cy="6" r="4.5"' if kind.startswith("dot") else '<rect x="1" y="1" width="10" height="10"'
        )
        mark = f'<svg viewBox="0 0 12 12" aria-hidden="true">{shape} class="{kind}"/></svg>'
        items.append(f"<li>{mark}{escape(words)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


def name_lines(name: str, columns: int) -> tuple[str, ...]:
    """A layer's name in at most two lines of `columns` characters, broken behind `+`, or else behind `.` or `_`.

    A name that is longer loses the middle of its second line.
    """
    if len(name) <= columns:
        return (name,)
    plus, first = (_first_line(name, marks, columns) for marks in ("+", "+._"))
    if plus and len(name) - len(plus) <= columns:
        first = plus
    first = first or name[:columns]
    return (first, shortened(name[len(first) :], columns))


def _first_line(name: str, marks: str, columns: int) -> str:
    """As much of a name as fits on a line that ends with one of the marks."""
    line = ""
    for part in re.findall(f"[^{marks}]*[{marks}]", name):
        if len(line) + len(part) > columns:
            break
        line += part
    return line


def shortened(name: str, columns: int) -> str:
    """A name of at most `columns` characters: a longer one loses its middle."""
    if len(name) <= columns:
        return name
    head = (columns - 1) // 2
    return name[:head] + ELLIPSIS + name[len(name) - (columns - 1 - head) :]
