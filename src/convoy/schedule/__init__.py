"""Order, streams, lifetimes and memory of what was chosen. No torch here."""

from __future__ import annotations

from convoy.schedule.collectives import Collective, buckets, collectives, sent_together
from convoy.schedule.contention import CostModel, Sharing, fit_capacity, simulate
from convoy.schedule.dag import Dag, dag_of
from convoy.schedule.grouped_casts import cast_together
from convoy.schedule.memory import Arena, check, lifetimes, plan_memory
from convoy.schedule.parallel_plan import contention, critical_us, device_us, exposed_us, parallel
from convoy.schedule.resources import Capacity, Kernel, share_of
from convoy.schedule.serial_plan import serial
from convoy.schedule.smaller_configs import frugal, others
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
    "cast_together",
    "check",
    "collectives",
    "contention",
    "critical_us",
    "dag_of",
    "device_us",
    "exposed_us",
    "finished_before",
    "fit_capacity",
    "frugal",
    "lifetimes",
    "others",
    "parallel",
    "plan_memory",
    "sent_together",
    "serial",
    "share_of",
    "simulate",
    "spread",
]
