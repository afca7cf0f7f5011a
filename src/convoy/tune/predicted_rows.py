"""Predictions as rows, which stand beside measured ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Problem
from convoy.tune.predict import TimePredictor


def predicted_rows(
    predictor: TimePredictor,
    problem: Problem,
    space: Mapping[str, Sequence[EngineConfig]],
    target: str,
    protocol: str,
    *,
    regrets: Mapping[str, float] | None = None,
    estimate: Callable[[EngineConfig], float | None] = lambda config: None,  # noqa: ARG005
    floor_us: float = 0.0,
) -> list[Measurement]:
    """Predictions as rows without samples; they are never stored.

    Args:
        predictor: predicts the times.
        problem: the problem.
        space: every supporting engine's configs, the default first.
        target: the target's digest.
        protocol: the protocol's id.
        regrets: the criteria's regret of each engine; None if they do not cover the problem.
        estimate: an engine's cost model.
        floor_us: time of a direct, dense algorithm at the device's peak rates; 0 if it is not known.
    """
    reason = f"predicted from {predictor.measurements} measurements of other problems"
    reason += " and the criteria" if regrets else ""
    times = predictor.predict_with(problem, space, regrets=regrets, estimate=estimate, floor_us=floor_us)
    return [
        Measurement(
            problem.key,
            config,
            target,
            protocol,
            Status.OK,
            median_us=time_us,
            deterministic=predictor.is_deterministic(problem, config),
            reason=reason,
        )
        for config, time_us in times.items()
    ]
