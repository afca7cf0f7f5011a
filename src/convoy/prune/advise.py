"""The sparsity from which pruning makes a layer faster, by pattern: measures dense engines against engines that read masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from convoy.capture import Captured
from convoy.capture.weight_masks import LEAST_SPARSITY, mask_of
from convoy.engines.base import Engine
from convoy.engines.manifest import load_engine
from convoy.errors import InputError
from convoy.measurement import Runner
from convoy.measurement.engine_space import query_engine
from convoy.perfdb import Database, Measurement
from convoy.problem import ConvProblem
from convoy.prune.accuracy import Progress
from convoy.prune.defaults import measure_defaults
from convoy.prune.magnitude import magnitude_mask
from convoy.prune.patterns import Pattern, misfit, parse_pattern
from convoy.regions import Region, propose
from convoy.settings import Effort, Settings
from convoy.target import Target
from convoy.tune import SearchResult, search

PATTERNS: Final = ("unstructured", "2:4", "block:1x8", "channel")
"""Patterns to try if the user names none."""

QUICK_GRID: Final = (LEAST_SPARSITY, 0.6, 0.9)
FULL_GRID: Final = (LEAST_SPARSITY, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Sparsities to try, by effort: from the least that counts as pruned to those that papers on pruned kernels report."""

LAYOUTS: Final = ("nchw", "nhwc")


@dataclass(frozen=True, slots=True)
class SparsityPoint:
    """The fastest engine at one sparsity. If no engine ran, `us` is 0, `engine` is empty, and `reason` says why."""

    sparsity: float
    us: float
    engine: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PatternAdvice:
    """Predicted effect of one pattern on a layer.

    Attributes:
        pattern: as `parse_pattern` reads it.
        points: by rising sparsity.
        break_even: the least sparsity from which it is faster than dense, interpolated between points; None if it never is.
        reason: why nothing could be measured; empty if something was.
    """

    pattern: str
    points: tuple[SparsityPoint, ...]
    break_even: float | None
    reason: str = ""

    @property
    def best(self) -> SparsityPoint | None:
        """The fastest of its points."""
        return min((point for point in self.points if point.engine), key=lambda point: point.us, default=None)


@dataclass(frozen=True, slots=True)
class LayerAdvice:
    """Advice for one convolution, or for several of the same sizes.

    Attributes:
        names: of the layers; the masks were made from the first one's weights.
        problem: key of the dense problem, including the operators fused with it.
        dense_us: the fastest dense engine.
        dense_engine: its id.
        patterns: in the order in which the user named them.
    """

    names: tuple[str, ...]
    problem: str
    dense_us: float
    dense_engine: str
    patterns: tuple[PatternAdvice, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """Result of `convoy prune --advise`; `to_dict` is the schema of its `--json`."""

    model: str
    target: dict[str, Any]
    layers: tuple[LayerAdvice, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON's types, nested."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A distinct convolution: its dense problem in every memory format, and a weight to make masks of."""

    names: tuple[str, ...]
    problems: tuple[ConvProblem, ...]
    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Trial:
    """One share of zeros: the masked problem in every memory format."""

    sparsity: float
    problems: tuple[ConvProblem, ...]


class _Progress:
    """Reports the progress of the search to an observer."""

    def __init__(self, observer: Progress | None) -> None:
        self._observer = observer

    def __call__(self, done: int, total: int, message: str) -> None:
        if self._observer is not None:
            self._observer(message, done, total)


def advise(
    name: str,
    captured: Captured,
    *,
    target: Target,
    settings: Settings,
    database: Database,
    runner: Runner,
    engine_ids: Sequence[str],
    patterns: Sequence[str] = PATTERNS,
    observer: Progress | None = None,
) -> Advice:
    """Measure the speed-up that pruning would give each convolution of a net.

    A distinct convolution is measured together with the operators that the same kernel can compute. `search` finds the fastest
    dense engine, as in `optimize`. Then each pattern and each sparsity of a grid gives a mask of the layer's weights by
    magnitude, and the engines that read masks are measured with it in both memory formats. At effort quick they run with
    their default knobs only. The time of layout changes is not counted.

    Args:
        name: of the model.
        captured: the net.
        target: the device.
        settings: effort (quick or full), numerics, and the other settings that `search` reads.
        database: where rows come from and go to.
        runner: measures candidates.
        engine_ids: engines that compete.
        patterns: to try.
        observer: called with (message, done, total).

    Raises:
        InputError: effort none, an unknown pattern, or a net without convolutions of constant weights.
    """
    if settings.effort is Effort.NONE:
        raise InputError("effort", "none", "quick or full", "Advice is measured, not predicted.")
    wanted = [parse_pattern(pattern) for pattern in patterns]
    layers = _layers(captured, str(settings.numerics))
    grid = FULL_GRID if settings.effort is Effort.FULL else QUICK_GRID
    trials = {(i, p): _trials(layer, p, grid) for i, layer in enumerate(layers) for p in wanted}
    engines = [load_engine(engine, settings.engines) for engine in engine_ids]
    sparse = _mask_readers(engines, [t for found in trials.values() for t in found], target)
    if not sparse:
        note = f"no engine reads masks on {target.name} at numerics {settings.numerics}: pruning makes no layer faster here"
        return Advice(name, target.to_dict(), (), (note,))
    progress = _Progress(observer)
    searching = partial(
        search, target=target, settings=settings, database=database, runner=runner, on_progress=progress
    )
    dense = searching([p for x in layers for p in x.problems], engine_ids=engine_ids)
    problems = [p for found in trials.values() for trial in found for p in trial.problems]
    if settings.effort is Effort.FULL:
        masked = searching(problems, engine_ids=[e.id for e in sparse])
    else:
        measuring = partial(measure_defaults, target=target, settings=settings, database=database, runner=runner)
        masked = measuring(problems, sparse, on_progress=progress)
    found = tuple(
        _layer_advice(layer, wanted, [trials[i, p] for p in wanted], dense, masked) for i, layer in enumerate(layers)
    )
    return Advice(name, target.to_dict(), found, ())


def break_even(points: Sequence[tuple[float, float]], dense_us: float) -> float | None:
    """The least sparsity from which every time is at or below the dense time, interpolated linearly between two points.

    Args:
        points: (sparsity, us), by rising sparsity.
        dense_us: time of the fastest dense engine, in microseconds.

    Returns:
        The first point's sparsity if that point is already at or below the dense time; None if the last point is not.
    """
    found: float | None = None
    for index in range(len(points) - 1, -1, -1):
        sparsity, us = points[index]
        if us > dense_us:
            break
        found = sparsity
        if index and points[index - 1][1] > dense_us:
            before, slower = points[index - 1]
            return before + (sparsity - before) * (slower - dense_us) / (slower - us)
    return found


def _layers(captured: Captured, numerics: str) -> list[_Layer]:
    """The net's distinct convolutions, each with the most operators that one kernel can fuse with it, in graph order."""
    fullest: dict[str, Region] = {}
    for region in propose(captured.graph, layouts=LAYOUTS, numerics=numerics):
        if region.pattern == "conv" and region.constants:
            known = fullest.get(region.nodes[0])
            fullest[region.nodes[0]] = region if known is None or len(region.nodes) > len(known.nodes) else known
    same: dict[str, list[str]] = {}
    for node, region in fullest.items():
        same.setdefault(region.problems[0].key, []).append(node)
    if not same:
        raise InputError("model", "no convolution", "a model with convolutions of constant weights")
    found: list[_Layer] = []
    for names in same.values():
        region = fullest[names[0]]
        problems = tuple(p for p in region.problems if isinstance(p, ConvProblem))
        weight = captured.constants[region.constants[0]].detach().cpu()
        if not bool(torch.isfinite(weight).all()):
            raise InputError("weights", names[0], "finite numbers alone", "Some of its weights are NaN or infinite.")
        found.append(_Layer(tuple(names), problems, weight))
    return found


def _trials(layer: _Layer, pattern: Pattern, grid: Sequence[float]) -> list[_Trial]:
    """Masked problems by sparsity; empty if the pattern does not fit the layer."""
    if misfit(pattern, layer.weight):
        return []
    shares = [pattern.fixed_sparsity] if pattern.fixed_sparsity is not None else grid
    found: list[_Trial] = []
    for share in shares:
        mask = mask_of(layer.weight * magnitude_mask(layer.weight, layer.problems[0].groups, pattern, share))
        found.append(_Trial(mask.sparsity, tuple(problem.with_mask(mask) for problem in layer.problems)))
    return found


def _mask_readers(engines: Sequence[Engine], trials: Sequence[_Trial], target: Target) -> list[Engine]:
    """The engines for pruned weights that support at least one of the masked problems."""
    problems = [problem for trial in trials for problem in trial.problems]
    return [
        engine for engine in engines if engine.reads_mask and any(query_engine(engine, p, target)[0] for p in problems)
    ]


def _layer_advice(
    layer: _Layer,
    patterns: Sequence[Pattern],
    trials: Sequence[Sequence[_Trial]],
    dense: SearchResult,
    masked: SearchResult,
) -> LayerAdvice:
    best = _fastest(dense.rows, layer.problems)
    dense_us = best.median_us if best is not None else 0.0
    found: list[PatternAdvice] = []
    for pattern, tried in zip(patterns, trials, strict=True):
        points = tuple(_point(trial, masked) for trial in tried)
        times = [(point.sparsity, point.us) for point in points if point.engine]
        reason = misfit(pattern, layer.weight) if not tried else "" if times else points[0].reason
        found.append(PatternAdvice(str(pattern), points, break_even(times, dense_us) if best else None, reason))
    return LayerAdvice(layer.names, layer.problems[0].key, dense_us, best.config.engine if best else "", tuple(found))


def _point(trial: _Trial, masked: SearchResult) -> SparsityPoint:
    best = _fastest(masked.rows, trial.problems)
    if best is not None:
        return SparsityPoint(trial.sparsity, best.median_us, best.config.engine)
    keys = [problem.key for problem in trial.problems]
    failed = [f"{row.config.engine}: {row.status}, {row.reason}" for key in keys for row in masked.rows.get(key, ())]
    refused = [f"{engine}: {why}" for key in keys for engine, why in masked.refusals.get(key, {}).items()]
    reason = next(iter([*failed, *refused]), "no engine reads masks")
    return SparsityPoint(trial.sparsity, 0.0, "", reason)


def _fastest(rows: Mapping[str, Sequence[Measurement]], problems: Sequence[ConvProblem]) -> Measurement | None:
    found = [row for problem in problems for row in rows.get(problem.key, ()) if row.ok]
    return min(found, key=lambda row: row.median_us, default=None)
