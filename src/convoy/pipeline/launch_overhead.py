"""The overhead of a launch on a CPU. Selection adds it to the times of candidates; the times that are shown do not contain it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from convoy.engines.manifest import load_engine
from convoy.problem import EngineConfig
from convoy.selection import Selection, SelectionProblem

INTERPRETED_US: Final = 100.0
"""Of a launch that goes through Python, more than in a benchmark's loop: code and objects come from the last cache or from
memory, and so does a result in new memory. ResNet-50 at batch 1 took 53.1 ms with 64 such launches, and 44.3 with 42 of them in
chains (two cores of an EPYC 9004)."""


def launch_us(config: EngineConfig, device: str, extra_engines: tuple[str, ...] = ()) -> float:
    """Overhead of a config's launch, microseconds; 0 on a GPU, where launches are nodes of one CUDA graph."""
    return INTERPRETED_US if device == "cpu" and not load_engine(config.engine, extra_engines).native else 0.0


def with_launch_costs(problem: SelectionProblem, device: str, extra_engines: tuple[str, ...] = ()) -> SelectionProblem:
    """A selection problem with the launch overhead added to every time, for the solvers."""
    if device != "cpu":
        return problem

    def beside(config: EngineConfig) -> float:
        return launch_us(config, device, extra_engines)

    candidates = tuple(replace(c, median_us=c.median_us + beside(c.config)) for c in problem.candidates)
    copies = {name: time_us + beside(problem.copies[name].config) for name, time_us in problem.convert_us.items()}
    return replace(problem, candidates=candidates, convert_us=copies)


def without_launch_costs(selection: Selection, problem: SelectionProblem, device: str) -> Selection:
    """A selection with the candidates' measured times again. Its totals keep the launch overhead.

    Args:
        selection: the selection from the problem with overheads.
        problem: the problem without overheads.
        device: `cpu` or `cuda`.
    """
    if device != "cpu":
        return selection
    own = {(c.region, c.problem, c.config): c for c in reversed(problem.candidates)}
    chosen = tuple(own[c.region, c.problem, c.config] for c in selection.chosen)
    conversions = tuple(
        replace(c, median_us=problem.convert_us[c.value, c.source, c.layout]) for c in selection.conversions
    )
    return replace(selection, chosen=chosen, conversions=conversions)
