"""Which configs of an engine to measure next, given the rows so far."""

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
"""An engine is searched further if its best time is within this factor of the overall best, or if its cost model predicts a
better config. On real layers, knobs change one engine's time by less than this once its default is reasonable."""

QUICK_CONFIGS: Final = 8
"""Configs of one engine that effort `quick` tries besides its default, unless the engine sets `Engine.quick_settings`."""

QUICK_COMPILED_CONFIGS: Final = 4
"""The same for an engine that compiles (`Engine.trusted` is False): one build takes a core one to two seconds."""


def next_configs(
    space: SearchSpace, board: Leaderboard, engine: Engine, bucket: SparsityBucket | None, *, full: bool
) -> list[EngineConfig]:
    """Configs of one engine to measure next, the most promising first; empty if the engine is too slow or was tried enough.

    Args:
        space: the problem's search space.
        board: the rows so far.
        engine: an engine of the space.
        bucket: the sparsity bucket to search for; None for an engine whose time does not depend on zeros.
        full: whether every config is tried.
    """
    best = board.best(bucket)
    if best is None:
        return []
    best_us = best.median_us
    percent = None if bucket is None else bucket.at(engine.zeros_kind)
    own_space = [config for config in space.configs[engine.id] if sparsity_percent(config.knobs) == percent]
    tried = [board.rows[config] for config in own_space if config in board.rows]
    untried = [config for config in own_space if config not in board.rows]
    quick = engine.quick_settings
    if quick is None:
        quick = QUICK_CONFIGS if engine.trusted else QUICK_COMPILED_CONFIGS
    budget = len(untried) if full else quick + 1 - len(tried)
    if not untried or budget <= 0:
        return []
    own = min(filter(board.is_usable, tried), key=lambda row: row.median_us, default=None)
    estimates = {config: space.estimate_us(config) for config in untried}
    promising = [value for value in estimates.values() if value is not None and value <= best_us]
    if own is None and (smaller := _with_less_workspace(space, tried, untried)):
        return by_estimate(smaller, estimates)[:budget]
    if (own is None or own.median_us > SEARCH_RATIO * best_us) and not promising:
        return []
    ordered = by_estimate(untried, estimates)
    if full:
        return ordered
    from_model = quick // 2
    if len(tried) <= from_model or own is None:
        return ordered[: min(budget, max(1, from_model + 1 - len(tried)))]
    near = neighbours(own.config.knobs, [config.knobs for config in untried])
    return [replace(own.config, knobs=knobs) for knobs in near][:budget]


def _with_less_workspace(
    space: SearchSpace, tried: Sequence[Measurement], untried: Sequence[EngineConfig]
) -> list[EngineConfig]:
    """Untried configs that need less workspace than those that ran out of memory; none if no config ran out of memory."""
    failed = [space.workspace_bytes(row.config) for row in tried if row.status is Status.OUT_OF_MEMORY]
    least = min((size for size in failed if size is not None), default=0)
    sizes = {config: space.workspace_bytes(config) for config in untried} if least else {}
    return [config for config, size in sizes.items() if size is not None and size < least]
