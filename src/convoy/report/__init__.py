"""The result for people: summary, tables, HTML page."""

from __future__ import annotations

from convoy.report.html import write_html
from convoy.report.summary import Summary, write_json
from convoy.report.tables import print_summary, print_table

__all__ = ["Summary", "print_summary", "print_table", "write_html", "write_json"]
