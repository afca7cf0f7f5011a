"""Order, streams, lifetimes and memory of what was chosen. No torch here."""

from __future__ import annotations

from convoy.schedule.dag import Dag, dag_of
from convoy.schedule.memory import Arena, check, lifetimes, plan_memory
from convoy.schedule.streams import EVENT_US, Placed, finished_before, spread

__all__ = [
    "EVENT_US",
    "Arena",
    "Dag",
    "Placed",
    "check",
    "dag_of",
    "finished_before",
    "lifetimes",
    "plan_memory",
    "spread",
]
