"""The configs that an engine offers for a problem, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from convoy.engines.base import DETERMINISTIC, Engine
from convoy.measurement.known_spaces import KnownSpaces
from convoy.problem import EngineConfig, Knob, Knobs, Problem
from convoy.support import Support
from convoy.target import Target


def query_engine(
    engine: Engine, problem: Problem, target: Target, spaces: KnownSpaces | None = None
) -> tuple[Support, Sequence[Knobs]]:
    """Whether an engine supports a problem, and its knob space.

    An engine that raises refuses, with the exception as the reason.

    Args:
        engine: the engine.
        problem: the problem.
        target: the device.
        spaces: that target's known spaces; None: the engine is asked.
    """
    try:
        support = engine.accepts(problem, target)
        space = (spaces.space(engine, problem) if spaces else engine.space(problem, target)) if support else ()
    except Exception as error:  # one broken engine must not end the search of the others
        return Support.no(f"raised {type(error).__name__} when asked: {error}"), ()
    if support and not space:
        return Support.no("offers no knobs for this problem"), ()
    return support, space


def select_for_determinism(space: Sequence[Knobs], *, deterministic: bool) -> list[Knobs]:
    """Knobs for the setting `deterministic`: those reserved for it if it is set and there are any, else all others."""
    reserved = [knobs for knobs in space if (DETERMINISTIC, True) in knobs.items_]
    if deterministic and reserved:
        return reserved
    others = set(map(id, reserved))
    return [knobs for knobs in space if id(knobs) not in others] if others else list(space)


def deterministic_only(
    engine: Engine, problem: Problem, target: Target, space: Sequence[Knobs]
) -> tuple[list[Knobs], str]:
    """The knobs that are not known to be nondeterministic, and the reason why one of the others may be."""
    try:
        reasons = {knobs: engine.nondeterminism_reason(problem, knobs, target) for knobs in space}
    except Exception as error:  # one broken engine must not end the search of the others
        return [], f"raised {type(error).__name__} when asked: {error}"
    return [knobs for knobs in space if not reasons[knobs]], next(filter(None, reasons.values()), "")


def offered_knobs(
    engine: Engine, problem: Problem, target: Target, *, deterministic: bool, spaces: KnownSpaces | None = None
) -> tuple[list[Knobs], str]:
    """The knobs that compete for a problem, and the reason if there are none; `spaces` as for `query_engine`."""
    support, space = query_engine(engine, problem, target, spaces)
    space = select_for_determinism(space, deterministic=deterministic)
    if not deterministic or not support:
        return (space, "") if support and space else ([], support.reason)
    space, reason = deterministic_only(engine, problem, target, space)
    return (space, "") if space else ([], f"{reason}, and `deterministic` was asked for")


def by_estimate(configs: Sequence[EngineConfig], estimates: Mapping[EngineConfig, float | None]) -> list[EngineConfig]:
    """Configs in the order of the cost model; in the space's own order without one."""
    known = {config: value for config, value in estimates.items() if value is not None}
    return sorted(configs, key=known.__getitem__) if len(known) == len(configs) else list(configs)


def neighbours(knobs: Knobs, others: Sequence[Knobs]) -> list[Knobs]:
    """The knobs that differ from the given ones in one value, nearest first: by one step of that knob's values, then two."""
    found: list[tuple[int, Knobs]] = []
    values: dict[str, list[Knob]] = {name: _sorted(k[name] for k in (knobs, *others) if name in k) for name in knobs}
    for other in others:
        if set(other) != set(knobs):
            continue
        changed = [name for name in knobs if other[name] != knobs[name]]
        if len(changed) == 1:
            steps = values[changed[0]]
            found.append((abs(steps.index(other[changed[0]]) - steps.index(knobs[changed[0]])), other))
    return [other for _, other in sorted(found, key=lambda item: item[0])]


def _sorted(values: Iterable[Knob]) -> list[Knob]:
    """Numbers in their order; words in the order in which they occur, which is the engine's preference."""
    distinct = list(dict.fromkeys(values))
    return distinct if any(isinstance(value, str) for value in distinct) else sorted(distinct)
