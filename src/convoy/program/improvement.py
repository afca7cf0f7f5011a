"""Improving an optimized module that is in use: its tuner finds a better program, which takes the place of the present one."""

from __future__ import annotations

import math
import threading
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import nn

from convoy.errors import InputError
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.call_forms import CallArguments, checked_arguments
from convoy.program.program_cache import CachedProgram, ProgramCache, Tuner
from convoy.program.runnable_program import Program
from convoy.user_warning import warn_user

_ONE_AT_A_TIME: Final = threading.Lock()


@runtime_checkable
class TimedTuner(Protocol):
    """A tuner whose calls can be limited in time."""

    def within(self, time_s: float) -> Tuner:
        """The same, with this wall time for each call, seconds."""
        ...


@runtime_checkable
class ImprovingTuner(Protocol):
    """A tuner that can go on where it stopped."""

    def improved(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program, time_s: float
    ) -> Program:
        """The best program after `time_s` further seconds; the given one if none is faster."""
        ...


class Improvable(Protocol):
    """The part of an optimized module that is needed here."""

    model: nn.Module
    program_cache: ProgramCache

    def stale(self) -> str | None:
        """What was changed since the programs were made."""
        ...

    def refresh(self) -> None:
        """Make the programs again."""
        ...


def improve(module: Improvable, time_s: float, args: Any, kwargs: dict[str, Any] | None) -> Plan:
    """`OptimizedModule.improve`.

    Raises:
        InputError: `time_s` is no positive number, or no program was tuned for such arguments.
    """
    check_time(time_s)
    cache = module.program_cache
    tuner = cache.tuner
    if not isinstance(tuner, ImprovingTuner):
        warn_user("this model could not be captured as a whole: its layers are tuned one by one and are not improved")
        return cache.programs[0].plan
    with _ONE_AT_A_TIME:
        if module.stale() is not None:
            module.refresh()
        cached, (given, named) = _call_of(cache, module.model, args, kwargs)
        with calls.autocast_as(cached.program.autocast):
            better = tuner.improved(module.model, given, named, cached.program, time_s)
        if better is not cached.program and module.stale() is None:
            cache.swap(cached, better)
            return better.plan
        return cached.program.plan


def check_time(time_s: object) -> None:
    """Raise InputError unless this is a positive number of seconds."""
    if not isinstance(time_s, (int, float)) or isinstance(time_s, bool) or not 0 < time_s < math.inf:
        raise InputError("time_s", time_s, "a positive number of seconds")


def _call_of(
    cache: ProgramCache, model: nn.Module, args: Any, kwargs: dict[str, Any] | None
) -> tuple[CachedProgram, CallArguments]:
    """The program for a call, and its arguments in the form of the program's example."""
    if args is None and not kwargs:
        cached = next(iter(cache.tuned.values()))
        return cached, sample(cached.example)
    given, named = checked_arguments(model, () if args is None else args, kwargs)
    found = cache.find(given, named)
    if found is None:
        raise InputError("args", "other shapes or dtypes", "arguments of a tuned shape", "Call .tune(args) first.")
    cached, arrangement = found
    return cached, (given, named) if arrangement is None else arrangement(given, named)


def sample(example: calls.CallExample) -> CallArguments:
    """Arguments like an example's: normally distributed where they are floating-point, else zeros. The same in every call."""
    args, kwargs = example.zeros()

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            draws = torch.Generator(tensor.device).manual_seed(0)
            tensor.copy_(torch.randn(tensor.shape, generator=draws, device=tensor.device))
        return tensor

    return calls.map_tensors(draw, args), calls.map_tensors(draw, kwargs)
