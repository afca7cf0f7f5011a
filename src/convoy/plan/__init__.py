"""The plan of one net, its selection and schedule, as data: read, write, compare, explain. No torch here."""

from __future__ import annotations

from convoy.plan.describe import compare, explain
from convoy.plan.file import from_dict, load, paths_of, save, to_dict
from convoy.plan.plan import PLAN_VERSION, Plan, Step, StepCandidate
from convoy.plan.sizes_file import PlansForSizes, SizedPlan, SizeRange, load_plans, save_plans

__all__ = [
    "PLAN_VERSION",
    "Plan",
    "PlansForSizes",
    "SizeRange",
    "SizedPlan",
    "Step",
    "StepCandidate",
    "compare",
    "explain",
    "from_dict",
    "load",
    "load_plans",
    "paths_of",
    "save",
    "save_plans",
    "to_dict",
]
