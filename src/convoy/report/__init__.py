"""The result for people: summary, tables, HTML page."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from convoy.report.summary import Summary, write_json

if TYPE_CHECKING:
    from convoy.report.html import write_html as write_html
    from convoy.report.tables import print_summary as print_summary
    from convoy.report.tables import print_table as print_table

__all__ = [
    "Summary",
    "print_summary",
    "print_table",
    "write_html",
    "write_json",
]

_LAZY: Final = {
    "write_html": "convoy.report.html",
    "print_summary": "convoy.report.tables",
    "print_table": "convoy.report.tables",
}
"""Names that few sessions use, and where they are defined: pages and tables take 50 ms to import."""


if not TYPE_CHECKING:  # else every misspelt name would pass for one of the package

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
