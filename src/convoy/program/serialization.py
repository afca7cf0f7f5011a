"""Copies and pickles of optimised modules (those of training steps: `convoy.training.step_serialization`).

A copy belongs to a copy of the stock module. Programs hold packed weights and nothing of the module, so a copy shares them. A
pickle holds the stock module, the plans as text, and the arguments' shapes: what is loaded binds the plans again, or runs the
stock module, with a warning, where the machine, the software or the device differs.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from convoy import plan as plans
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.program_cache import CachedProgram, ProgramCache, Tuner
from convoy.user_warning import warn_user

if TYPE_CHECKING:
    from convoy.program.module import OptimizedModule

_RESTORED: Final = frozenset({"_serving", "_modules"})
LONGEST_REASON: Final = 300
"""Characters that are shown of why a plan could not be bound."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedProgram:
    """A program in a pickle.

    Attributes:
        plan: its plan, as JSON.
        example: the arguments that it was made for.
        signature: of such a call.
        by_name: the signature of the arguments by name.
        autocast: where autocast was on.
    """

    plan: str
    example: calls.CallExample
    signature: calls.Signature
    by_name: calls.Signature | None
    autocast: calls.Autocast


def copy_module(module: OptimizedModule, memo: dict[int, Any]) -> OptimizedModule:
    """A deep copy, bound to its own copy of the stock module."""
    made = module.__class__.__new__(module.__class__)
    memo[id(module)] = made
    nn.Module.__init__(made)
    model = copy.deepcopy(module.model, memo)
    memo[id(module._serving)] = module._serving.copied(model)
    made.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return made


def reduce_module(module: OptimizedModule) -> tuple[Any, ...]:
    """What a pickle holds; `restore_module` is the inverse."""
    served = list(module._serving.tuned.values())
    saved = [
        SavedProgram(plan_text(one.program.plan), one.example, one.signature, one.by_name, one.program.autocast)
        for one in served
    ]
    attributes = {name: value for name, value in module.__dict__.items() if name not in _RESTORED}
    check = module._serving.check
    return restore_module, (type(module), module.model, saved, module._serving.tuner, check, attributes)


def restore_module(
    kind: type[OptimizedModule],
    model: nn.Module,
    saved: list[SavedProgram],
    tuner: Tuner,
    check: str,
    attributes: dict[str, Any],
) -> OptimizedModule:
    """The module of a pickle. A plan that cannot be bound here is replaced by the stock module, and one warning says why."""
    from convoy.program.module import Program

    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.model = model
    serving = made._serving = ProgramCache(model, tuner, check)
    refused = ""
    for one in saved:
        plan = plan_of(one.plan)
        program = Program(plan, None, None)
        if not plan.baseline:
            try:
                args, kwargs = one.example.zeros()
                with calls.autocast_as(one.autocast):
                    program = tuner(model, args, kwargs, plan)
            except Exception as error:  # a device, a library or an engine that is not there may raise anything
                refused = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
                program = Program(unbound(plan, refused), None, None)
        program.autocast = one.autocast
        serving.put(CachedProgram(program, one.example, one.signature, one.by_name))
    made.__dict__.update(attributes)
    if refused:
        warn_user(f"a loaded plan cannot be bound here: the stock module runs; call .refresh() to tune it ({refused})")
    return made


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
