"""Whether a step's engine and knobs can be used here, and the baseline in their place where they cannot."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from convoy.engines.manifest import BASELINE, load_engine
from convoy.errors import InputError, PlanError
from convoy.plan.plan import Step
from convoy.problem import ConvProblem, EngineConfig, Knobs, Problem
from convoy.target import Target


def why_not(config: EngineConfig, problem: Problem, target: Target, extra_engines: tuple[str, ...] = ()) -> str:
    """Why a config cannot be used for a problem here; empty if it can.

    The engine must offer these knobs for the problem on this target, so that only configs that tuning could measure are built.
    """
    # The cache's key has the knobs' text: 1 and true are equal in Python, but different knobs.
    return _why_not(config.engine, config.version, str(config.knobs), problem, target, extra_engines)


@lru_cache(maxsize=4096)
def _why_not(
    engine_id: str, version: int, knobs: str, problem: Problem, target: Target, extra_engines: tuple[str, ...]
) -> str:
    try:
        engine = load_engine(engine_id, extra_engines)
    except InputError as error:
        return f"this version of Convoy has no such engine ({error})"
    except ImportError as error:
        return f"the engine cannot be imported ({error})"
    if version != engine.version:
        return f"the plan is for version {version} of the engine, which has version {engine.version} here"
    try:
        support = engine.accepts(problem, target)
        if not support:
            return support.reason
        return (
            ""
            if engine.has_knobs(problem, Knobs.parse(knobs), target)
            else f"the engine does not offer the knobs {knobs} here"
        )
    except Exception as error:  # an engine, for example a user's, may raise anything
        return f"the engine raised {type(error).__name__} when it was asked: {error}"


def on_baseline(index: int, step: Step, problem: Problem, target: Target, reason: str) -> tuple[Step, Problem]:
    """The same step run by the baseline, and its problem then: PyTorch computes pruned weights as it does dense ones."""
    engine = load_engine(BASELINE)
    if isinstance(problem, ConvProblem) and problem.weight_mask:
        problem = problem.with_mask(None)
    support = engine.accepts(problem, target)
    if not support:
        raise PlanError(f"steps[{index}].engine", step.config.engine, "an engine that can do this step", reason)
    config = engine.config(engine.space(problem, target)[0])
    return replace(step, problem=problem.key, config=config, workspace_bytes=0), problem
