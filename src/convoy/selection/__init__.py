"""The choice of candidates: cover the graph in the least total time. No torch here."""

from __future__ import annotations

from convoy.selection.finalize import LiveValue, live_values
from convoy.selection.order import LaunchOrder
from convoy.selection.problem import Candidate, Conversion, LayoutCopy, RegionNodes, Selection, SelectionProblem
from convoy.selection.solve import TIME_LIMIT_S, solve

__all__ = [
    "TIME_LIMIT_S",
    "Candidate",
    "Conversion",
    "LaunchOrder",
    "LayoutCopy",
    "LiveValue",
    "RegionNodes",
    "Selection",
    "SelectionProblem",
    "live_values",
    "solve",
]
