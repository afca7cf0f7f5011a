"""At effort `none` a library is asked about a layer only where its answer may change the choice.

cuDNN takes 10 ms to list its plans for a layer and an epilogue. Where the database has the times of a layer, the list only says
which of these times still hold. Where another engine is as fast as the best of them, it need not be asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.base import Engine
from convoy.problem import ConvolutionProblem, Problem
from convoy.settings import Effort, Settings, Solver
from convoy.target import Target


def spared_engines(engines: Sequence[Engine], settings: Settings, target: Target) -> list[Engine]:
    """The competing engines that are not asked before stored rows are known.

    None, where a slower candidate may be chosen: for its memory, for the same bits in every run, or because it was named.
    """
    fastest_wins = settings.solver in (Solver.EXACT, Solver.GREEDY) and settings.memory_budget_bytes is None
    if settings.effort is not Effort.NONE or target.device != "cuda" or not fastest_wins or settings.deterministic:
        return []
    return [engine for engine in engines if engine.asks_library and engine.id not in settings.only_engines]


def spared_for(problem: Problem, engines: Sequence[Engine]) -> Sequence[Engine]:
    """Those of some engines that would ask a library about a problem."""
    return engines if isinstance(problem, ConvolutionProblem) else ()
