"""The choice: cover the graph with candidates at least total time. No torch here."""

from __future__ import annotations

from convoy.selection.order import LaunchOrder
from convoy.selection.problem import Candidate, Conversion, Copy, Cover, Selection, SelectionProblem
from convoy.selection.settle import Form, value_forms
from convoy.selection.solve import TIME_LIMIT_S, solve

__all__ = [
    "TIME_LIMIT_S",
    "Candidate",
    "Conversion",
    "Copy",
    "Cover",
    "Form",
    "LaunchOrder",
    "Selection",
    "SelectionProblem",
    "solve",
    "value_forms",
]
