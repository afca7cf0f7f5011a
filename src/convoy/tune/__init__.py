"""The search: which candidates of each problem are measured, in which order, and what is predicted.

See docs/concepts/measurement.md.
"""

from __future__ import annotations

from convoy.tune.search import SearchResult, search

__all__ = ["SearchResult", "search"]
