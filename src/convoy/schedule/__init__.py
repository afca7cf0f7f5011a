"""Order, streams, lifetimes and memory of a plan's steps. No torch here."""

from __future__ import annotations

from convoy.schedule.collectives import Collective, allreduce_buckets, buckets, collectives
from convoy.schedule.contention import CapacityModel, ContentionModel, fit_capacity, simulate
from convoy.schedule.dag import Dag, dag_of
from convoy.schedule.grouped_casts import cast_groups
from convoy.schedule.memory import Arena, check, lifetimes, plan_memory
from convoy.schedule.parallel_plan import critical_us, device_us, exposed_us, fit_contention, parallel_steps
from convoy.schedule.resources import DeviceResources, KernelResources, share_of
from convoy.schedule.serial_plan import serial_steps
from convoy.schedule.smaller_configs import alternative_steps, use_smaller_configs
from convoy.schedule.streams import EVENT_US, MAX_ORDERS, ScheduledLaunch, assign_streams, finished_before

__all__ = [
    "EVENT_US",
    "MAX_ORDERS",
    "Arena",
    "CapacityModel",
    "Collective",
    "ContentionModel",
    "Dag",
    "DeviceResources",
    "KernelResources",
    "ScheduledLaunch",
    "allreduce_buckets",
    "alternative_steps",
    "assign_streams",
    "buckets",
    "cast_groups",
    "check",
    "collectives",
    "critical_us",
    "dag_of",
    "device_us",
    "exposed_us",
    "finished_before",
    "fit_capacity",
    "fit_contention",
    "lifetimes",
    "parallel_steps",
    "plan_memory",
    "serial_steps",
    "share_of",
    "simulate",
    "use_smaller_configs",
]
