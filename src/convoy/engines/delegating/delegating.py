"""Shared by engines that delegate a convolution: their knobs are the delegate's knobs, and `inner`, the delegate's id."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from convoy.engines.base import Engine
from convoy.engines.manifest import load_engine
from convoy.errors import InputError
from convoy.problem import ConvProblem, Knobs
from convoy.target import Target


@lru_cache(maxsize=4096)
def delegate_knobs(engine: str, problem: ConvProblem, target: Target) -> tuple[Knobs, ...]:
    """An engine's knob settings for a problem, its default first; none if it does not support the problem."""
    found = load_engine(engine)
    return tuple(found.space(problem, target)) if found.accepts(problem, target) else ()


def delegate_workspace_bytes(engine: Engine, problem: ConvProblem, knobs: Knobs) -> int | None:
    """A delegate's workspace in bytes; None for knobs that it lists and then refuses, as cuDNN does with some plans."""
    try:
        return engine.workspace_bytes(problem, knobs)
    except InputError:
        return None


def wrap_knobs(engine: str, knobs: Knobs, **more: Any) -> Knobs:
    """A delegate's knobs, its id, and the delegating engine's own knobs `more`."""
    return Knobs.of(inner=engine, **dict(knobs), **more)


def unwrap_knobs(knobs: Knobs, engines: Sequence[str], *added: str) -> tuple[str, Knobs]:
    """Inverse of `wrap_knobs`: the delegate's id and its knobs.

    Args:
        knobs: a delegating engine's knobs.
        engines: the engines that it may delegate to.
        added: names of the delegating engine's own knobs.

    Raises:
        InputError: the delegate is not among `engines`.
    """
    engine = knobs.get("inner", "")
    if engine not in engines:
        raise InputError("knobs", str(knobs), "inner as one of " + ", ".join(engines))
    return str(engine), Knobs.of(**{name: value for name, value in knobs.items() if name not in ("inner", *added)})
