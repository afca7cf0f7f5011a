"""The search: which candidates are measured, in which order, and which times are predicted (docs/concepts/measurement.md)."""

from __future__ import annotations

from convoy.tune.search import SearchResult, search

__all__ = ["SearchResult", "search"]
