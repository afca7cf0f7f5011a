"""What a pickle of an optimized module holds of its programs: plans as text, and the shapes that they were made for.

Programs hold packed weights and belong to their process. A module that is loaded binds the plans again. A plan that cannot be
bound, because the machine, the software or the device differs, is replaced by the stock module, with a warning. Pickles of
training steps: `convoy.training.step_serialization`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from torch import nn

from convoy import plan as plans
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.program_cache import CachedProgram, ProgramCache, Tuner
from convoy.program.runnable_program import Program
from convoy.program.shared_memory import sharing
from convoy.user_warning import warn_user

LONGEST_REASON: Final = 300
"""Characters that are shown of the reason why a plan could not be bound."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedProgram:
    """A program in a pickle.

    Attributes:
        plan: its plan, as JSON.
        example: the arguments that it was made for.
        signature: signature of such a call.
        normal: signature of the normal form of such a call.
        autocast: where autocast was on.
    """

    plan: str
    example: calls.CallExample
    signature: calls.Signature
    normal: calls.Signature | None
    autocast: calls.Autocast


def saved_programs(programs: Iterable[CachedProgram]) -> list[SavedProgram]:
    """What a pickle holds of programs; `restored_cache` is the inverse."""
    return [
        SavedProgram(plan_text(one.program.plan), one.example, one.signature, one.normal, one.program.autocast)
        for one in programs
    ]


def restored_cache(
    model: nn.Module, saved: Iterable[SavedProgram], tuner: Tuner, check: str
) -> tuple[ProgramCache, str]:
    """The programs of a pickle for a model, and why some of them could not be bound here; empty if all were."""
    cache = ProgramCache(model, tuner, check)
    refused = ""
    for one in saved:
        plan = plan_of(one.plan)
        program = Program(plan, None, None)
        if not plan.baseline:
            try:
                args, kwargs = one.example.zeros()
                with calls.autocast_as(one.autocast):
                    program = tuner(model, args, kwargs, plan)
            except Exception as error:  # a missing device, library or engine may raise anything
                refused = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
                program = Program(unbound(plan, refused), None, None)
        program = dataclasses.replace(program, autocast=one.autocast)
        cache.put(CachedProgram(program, one.example, one.signature, one.normal))
    return cache, refused


def unbound(plan: Plan, reason: str) -> Plan:
    """The baseline in place of a plan that cannot be bound, with a note."""
    note = f"the plan could not be bound when it was loaded: {reason}"
    return dataclasses.replace(plan, baseline=True, steps=(), notes=(*plan.notes, note))


def plan_text(plan: Plan) -> str:
    """A plan as JSON."""
    return json.dumps(plans.to_dict(plan))


def plan_of(text: str) -> Plan:
    """The plan of `plan_text`."""
    return plans.from_dict(json.loads(text))


def restore_module(
    kind: Any,
    model: nn.Module,
    saved: Sequence[SavedProgram],
    tuner: Tuner,
    check: str,
    attributes: Mapping[str, Any],
) -> Any:
    """The `OptimizedModule` of a pickle. If a plan cannot be bound here, the stock module runs in its place, with one warning."""
    made: Any = kind.__new__(kind)
    nn.Module.__init__(made)
    made.model = model
    made.__dict__.update(attributes)
    with sharing(made.memory_of_programs()):
        made.program_cache, refused = restored_cache(model, saved, tuner, check)
    if refused:
        warn_user(f"a loaded plan cannot be bound here: the stock module runs; call .refresh() to tune it ({refused})")
    return made
