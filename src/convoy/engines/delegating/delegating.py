"""Engines that arrange data and leave the products to another engine: its knobs stand among theirs, beside `inner`, its id."""

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
def settings(engine: str, problem: ConvProblem, target: Target) -> tuple[Knobs, ...]:
    """An engine's settings for a problem, its favourite first; none where it says no."""
    found = load_engine(engine)
    return tuple(found.space(problem, target)) if found.accepts(problem, target) else ()


def wanted_bytes(engine: Engine, problem: ConvProblem, knobs: Knobs) -> int | None:
    """An inner setting's workspace; None for one that its engine names and then refuses, as cuDNN does with some plans."""
    try:
        return engine.workspace_bytes(problem, knobs)
    except InputError:
        return None


def wrap(engine: str, knobs: Knobs, **more: Any) -> Knobs:
    """An inner engine's setting with what the outer one adds."""
    return Knobs.of(inner=engine, **dict(knobs), **more)


def unwrap(knobs: Knobs, engines: Sequence[str], *added: str) -> tuple[str, Knobs]:
    """Inverse of `wrap`; raises InputError where the inner engine is none of those that may be."""
    engine = knobs.get("inner", "")
    if engine not in engines:
        raise InputError("knobs", str(knobs), "inner as one of " + ", ".join(engines))
    return str(engine), Knobs.of(**{name: value for name, value in knobs.items() if name not in ("inner", *added)})
