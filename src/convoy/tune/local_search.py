"""Widening: which other settings of an engine are worth a look, given what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from convoy.engines.activation_sparsity import SparsityBucket, sparsity_percent
from convoy.engines.base import Engine
from convoy.measurement.engine_space import by_estimate, neighbours
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig
from convoy.tune.leaderboard import Leaderboard
from convoy.tune.search_space import SearchSpace

SEARCH_RATIO: Final = 1.5
"""An engine is searched further while its best comes within this factor of the best of all, or its cost model says that
another setting would: on real layers, knobs move one engine's time by less than that once its default is sane."""

QUICK_CONFIGS: Final = 8
"""Settings of one engine tried besides its default at effort `quick`, where the engine names no number of its own
(`Engine.quick_settings`)."""

QUICK_COMPILED_CONFIGS: Final = 4
"""The same for an engine that compiles (`Engine.trusted` is False): a build takes one to two seconds of a core."""


def next_configs(
    space: SearchSpace, standing: Leaderboard, engine: Engine, levels: SparsityBucket | None, *, full: bool
) -> list[EngineConfig]:
    """Settings of one engine to try next, the likeliest first; empty when it is out of the race or has had its turns.

    Args:
        space: what is on offer.
        standing: what was measured.
        engine: one of the space's.
        levels: the kind of input; None for an engine that heeds none.
        full: whether every setting is tried.
    """
    best = standing.best(levels)
    if best is None:
        return []
    best_us = best.median_us
    share = None if levels is None else levels.at(engine.zeros_kind)
    own_space = [config for config in space.configs[engine.id] if sparsity_percent(config.knobs) == share]
    tried = [standing.rows[config] for config in own_space if config in standing.rows]
    untried = [config for config in own_space if config not in standing.rows]
    quick = engine.quick_settings
    if quick is None:
        quick = QUICK_CONFIGS if engine.trusted else QUICK_COMPILED_CONFIGS
    budget = len(untried) if full else quick + 1 - len(tried)
    if not untried or budget <= 0 or (engine.id in space.refusals and not full):
        return []
    own = min(filter(standing.is_usable, tried), key=lambda row: row.median_us, default=None)
    estimates = {config: space.estimate_us(config) for config in untried}
    hopeful = [value for value in estimates.values() if value is not None and value <= best_us]
    if own is None and (smaller := _smaller(space, tried, untried)):
        return by_estimate(smaller, estimates)[:budget]
    if (own is None or own.median_us > SEARCH_RATIO * best_us) and not hopeful:
        return []
    ordered = by_estimate(untried, estimates)
    if full:
        return ordered
    favourites = quick // 2
    if len(tried) <= favourites or own is None:
        return ordered[: min(budget, max(1, favourites + 1 - len(tried)))]
    near = neighbours(own.config.knobs, [config.knobs for config in untried])
    return [replace(own.config, knobs=knobs) for knobs in near][:budget]


def _smaller(space: SearchSpace, tried: Sequence[Measurement], untried: Sequence[EngineConfig]) -> list[EngineConfig]:
    """Settings that want less workspace than those for which there was no memory; none where that was not the reason."""
    wanted = [space.workspace_bytes(row.config) for row in tried if row.status is Status.OUT_OF_MEMORY]
    least = min((size for size in wanted if size is not None), default=0)
    sizes = {config: space.workspace_bytes(config) for config in untried} if least else {}
    return [config for config, size in sizes.items() if size is not None and size < least]
