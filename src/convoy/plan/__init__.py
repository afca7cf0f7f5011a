"""Selection and schedule of one net as data: read, write, compare, explain. No torch here."""

from __future__ import annotations

from convoy.plan.file import from_dict, load, save, to_dict
from convoy.plan.frugal import frugal, others
from convoy.plan.parallel import contention, critical_us, device_us, exposed_us, parallel
from convoy.plan.plan import PLAN_VERSION, Plan, Step
from convoy.plan.serial import serial
from convoy.plan.together import cast_together
from convoy.plan.words import compare, explain

__all__ = [
    "PLAN_VERSION",
    "Plan",
    "Step",
    "cast_together",
    "compare",
    "contention",
    "critical_us",
    "device_us",
    "explain",
    "exposed_us",
    "from_dict",
    "frugal",
    "load",
    "others",
    "parallel",
    "save",
    "serial",
    "to_dict",
]
