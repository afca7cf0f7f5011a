"""Order, streams, lifetimes and memory of what was chosen. No torch here."""

from __future__ import annotations

from convoy.schedule.collectives import Collective, buckets, collectives, sent_together
from convoy.schedule.contention import CostModel, Sharing, fit_capacity, simulate
from convoy.schedule.dag import Dag, dag_of
from convoy.schedule.memory import Arena, check, lifetimes, plan_memory
from convoy.schedule.resources import Capacity, Kernel, share_of
from convoy.schedule.streams import EVENT_US, TRIES, Placed, finished_before, spread

__all__ = [
    "EVENT_US",
    "TRIES",
    "Arena",
    "Capacity",
    "Collective",
    "CostModel",
    "Dag",
    "Kernel",
    "Placed",
    "Sharing",
    "buckets",
    "check",
    "collectives",
    "dag_of",
    "finished_before",
    "fit_capacity",
    "lifetimes",
    "plan_memory",
    "sent_together",
    "share_of",
    "simulate",
    "spread",
]
