"""Which config computes a call: the engine asked for, or the fastest that the database knows."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import cast

import torch

from convoy.capture.weight_masks import mask_of
from convoy.engines.activation_sparsity import sparsity_percent
from convoy.engines.base import Engine
from convoy.engines.competition import check_engine_names
from convoy.engines.manifest import BASELINE, load_engine
from convoy.errors import InputError, UnsupportedError
from convoy.measurement.engine_space import select_for_determinism
from convoy.measurement.protocol import protocol_for
from convoy.measurement.statistics import SampleSummary, is_faster
from convoy.perfdb import Database, Measurement, default_path
from convoy.problem import ConvProblem, EngineConfig
from convoy.settings import Settings
from convoy.target import Target


def choose_config(
    engine: str, problem: ConvProblem, target: Target, settings: Settings
) -> tuple[EngineConfig, ConvProblem]:
    """A config, and the problem in a layout that its engine takes."""
    if engine == "auto":
        return _fastest(problem, target, settings, _stamp(settings.db)), problem
    if not isinstance(engine, str):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
        raise InputError("engine", engine, "an engine's id, or auto")
    found = load_engine(engine, settings.engines)
    refusals: list[str] = []
    for layout in sorted(("nchw", "nhwc"), key=lambda layout: layout != problem.layout):
        laid = problem.with_layout(layout)
        support = found.supports(laid, target)
        if support:
            return first_config(found, laid, target, settings), laid
        refusals.append(support.reason)
    raise UnsupportedError(engine, problem, "; ".join(dict.fromkeys(refusals)))


def first_config(engine: Engine, problem: ConvProblem, target: Target, settings: Settings) -> EngineConfig:
    """An engine's default for a problem that it supports: with `deterministic` the setting that is there for it, if any."""
    return engine.config(select_for_determinism(engine.space(problem, target), deterministic=settings.deterministic)[0])


def with_mask(engine: str, problem: ConvProblem, weight: torch.Tensor, settings: Settings) -> ConvProblem:
    """The problem with the weight's zeros, where the engine asked for is made for them."""
    if (
        engine == "auto"
        or not isinstance(cast("object", engine), str)
        or not load_engine(engine, settings.engines).reads_mask
    ):
        return problem
    return problem.with_mask(mask_of(weight))


def _stamp(db: Path | None) -> tuple[Path, tuple[int, ...]]:
    """The database's path and when it was last written, its write-ahead log included."""
    path = db or default_path()
    files = (path, path.with_name(path.name + "-wal"))
    return path, tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)


@lru_cache(maxsize=1024)
def _fastest(
    problem: ConvProblem, target: Target, settings: Settings, stamp: tuple[Path, tuple[int, ...]]
) -> EngineConfig:
    """The fastest measured config that may be used, or the baseline's."""
    check_engine_names(settings)
    path, _ = stamp
    with Database.open(path) as database:
        rows = database.lookup(problem.key, target.digest, protocol_for(settings.effort, target.device).id)
    config = first_config(load_engine(BASELINE), problem, target, settings)
    known = [row for row in rows if row.ok and row.config.engine == BASELINE]
    best = min(
        (row for row in rows if _allowed(row, problem, target, settings)), key=lambda r: r.median_us, default=None
    )
    if best is None or any(not is_faster(_timing(best), _timing(row)) for row in known):
        return config
    return best.config


def _allowed(row: Measurement, problem: ConvProblem, target: Target, settings: Settings) -> bool:
    """Whether a row's config may be used: measured right, still there, not excluded."""
    name = row.config.engine
    if not row.ok or name in settings.deny_engines or (settings.only_engines and name not in settings.only_engines):
        return False
    if settings.deterministic and not row.deterministic:
        return False
    if sparsity_percent(row.config.knobs):  # a time for an input with zeros, and nothing is known of this one
        return False
    try:
        engine = load_engine(name, settings.engines)
    except InputError:  # withdrawn, or the user's own of another session
        return False
    return engine.version == row.config.version and bool(engine.supports(problem, target))


def _timing(row: Measurement) -> SampleSummary:
    return SampleSummary(row.samples, row.median_us, row.spread_us)
