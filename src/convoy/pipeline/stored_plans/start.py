"""Starting from a stored plan: it is built, and its results are compared before anybody gets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

import torch

from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline.check import end_to_end
from convoy.pipeline.net import Net
from convoy.pipeline.stored_plans.plan_record import PlanRecord
from convoy.pipeline.stored_plans.plan_store import NOT_USED, PlanStore
from convoy.plan import Plan
from convoy.program import Program, build_program
from convoy.settings import Settings
from convoy.tuning_profile import phase

MOST_BASELINE_ERROR: Final = 2.0**-5
"""Relative error of PyTorch's own results up to which they are evidence: some tens of layers in bf16."""


class StoredPlanError(Exception):
    """A stored plan cannot be used here; the text says why."""


Started = TypeVar("Started")
Started_co = TypeVar("Started_co", covariant=True)


class Start(Protocol[Started_co]):
    """Makes the result of a call from a stored plan."""

    def result(self, record: PlanRecord, plan: Plan) -> Started_co:
        """Build, check and wrap the plan; raises StoredPlanError if it cannot be used."""
        ...


def start_stored(store: PlanStore, start: Start[Started]) -> Started | str:
    """The result of a call, from the stored plan.

    Args:
        store: where the plan would be.
        start: builds and checks it.

    Returns:
        The note of why a search is made instead; empty if there is no plan.
    """
    record = store.find()
    if record is None:
        return ""
    try:
        return start.result(record, store.told(record))
    except StoredPlanError as error:
        return f"{NOT_USED}: {error}"


def build_stored(plan: Plan, net: Net, settings: Settings) -> Program:
    """The program of a stored plan.

    Args:
        plan: the plan, as it was stored, with notes of this call.
        net: its net.
        settings: those of the call.

    Raises:
        StoredPlanError: it cannot be built, or would run in part on the baseline or without its CUDA graph.
    """
    try:
        program = build_program(plan, net.captured, net.regions_by_nodes, net.target, settings)
    except Exception as error:  # everything: a search follows, which meets the same fault if it is none of the plan
        if is_out_of_memory(error):
            torch.cuda.empty_cache()
        raise StoredPlanError(_first_line(error)) from None
    new = [note for note in program.plan.notes if note not in plan.notes]
    if new:
        raise StoredPlanError(new[0])
    return program


def agrees(ours: Sequence[torch.Tensor], stock: Sequence[torch.Tensor], record: PlanRecord, least: float) -> bool:
    """Whether results are so near to PyTorch's own that they are right against float64 too, without a float64 run.

    PyTorch's own error was `record.baseline_error` when the plan was found. What is allowed is `WORST_ERROR` times that, or
    `least`; the distance to PyTorch's results may use up the rest. An error beyond `MOST_BASELINE_ERROR` is no rounding but
    belongs to the weights of that search, so it says nothing about the present ones.

    Args:
        ours: floating-point results of the plan.
        stock: PyTorch's own.
        record: the stored plan.
        least: the relative error that is always allowed.
    """
    if record.baseline_error > MOST_BASELINE_ERROR:
        return False
    allowed = max(end_to_end.WORST_ERROR * record.baseline_error, least) - record.baseline_error
    return end_to_end.errors_against(list(ours), [tensor.double() for tensor in stock]).rel_l2_error <= allowed


def checked(run: Callable[[], str]) -> None:
    """Check a program.

    Args:
        run: says why its results are wrong; empty where they are right.

    Raises:
        StoredPlanError: they are wrong, or it cannot be run.
    """
    try:
        with phase("check", "results"):
            wrong = run()
    except Exception as error:  # everything: a search follows, which meets the same fault if it is none of the plan
        if is_out_of_memory(error):
            torch.cuda.empty_cache()
        raise StoredPlanError(_first_line(error)) from None
    if wrong:
        raise StoredPlanError(wrong)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
