"""The three strategies of the first paper against exact selection, on whole nets: the sum of the launches' times, and memory.

One algorithm for every layer, what PyTorch's library chooses by itself, the best of each layer by itself, and the choice that
also pays for copies between memory formats and for memory (`convoy.selection`). Copies are part of every sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from convoy.compare.runs.rows import Figure, Row
from convoy.errors import InternalError, SelectionError
from convoy.perfdb import Database
from convoy.pipeline.measure_net import measure, prediction_notes, with_counted_zeros
from convoy.pipeline.net import Net
from convoy.pipeline.observer import Observer
from convoy.pipeline.select import offered_candidates
from convoy.selection import Selection, SelectionProblem, solve
from convoy.settings import Settings
from convoy.tune import SearchResult

SOLVERS: Final = {"library": "baseline", "one algorithm": "single", "per layer": "greedy", "exact": "exact"}
"""The strategies: PyTorch's own choice; the best engine that is used wherever it can be, PyTorch elsewhere; the fastest of each
layer; the optimum."""


def strategies(net: Net, settings: Settings, database: Database, observer: Observer) -> tuple[list[Row], SearchResult]:
    """Measure a captured net and return each strategy's row and the search result; an impossible strategy has a reason."""
    net = with_counted_zeros(net, settings, observer)
    found = measure(net, settings, database, observer)
    problem = offered_candidates(net, found, settings)
    return strategy_rows(problem, _about(net, settings), found), found


def _about(net: Net, settings: Settings) -> dict[str, Any]:
    graph = net.captured.graph
    first = graph.values[graph.inputs[0]].spec
    return {"subject": net.name, "batch": first.shape[0], "dtype": first.dtype, "numerics": str(settings.numerics)}


def strategy_rows(problem: SelectionProblem, about: Mapping[str, Any], found: SearchResult | None = None) -> list[Row]:
    """A row for each strategy.

    Args:
        problem: the candidates.
        about: fields that all rows share.
        found: where the times come from: rows say how many of them are predicted.
    """
    rows: list[Row] = []
    predicted: dict[str, Any] = {}
    if found is not None and found.predicted:
        about = {**about, "notes": tuple(prediction_notes(found))}
        predicted = {"predicted": found.predicted, "problems": len(found.rows)}
    for strategy, solver in SOLVERS.items():
        best, reason = _solved(problem, solver)
        if best is None:
            rows.append(Row(provider=strategy, status="unsupported", reason=reason, **about))
            continue
        figures = (
            Figure.once("total_us", "us", best.total_us),
            Figure.once("peak_memory_bytes", "B", best.peak_bytes),
            Figure.once("workspace_bytes", "B", max((c.workspace_bytes for c in best.chosen), default=0)),
        )
        launches = (*best.chosen, *best.conversions)
        detail = {
            "engines": _engines(best),
            "copies": len(best.conversions),
            "bound_us": best.bound_us,
            "steps": len(launches),
            "predicted_steps": sum(launch.predicted and launch.median_us > 0 for launch in launches),
            **predicted,
        }
        rows.append(Row(provider=strategy, setting=best.solver, figures=figures, detail=detail, **about))
    return rows


def _solved(problem: SelectionProblem, solver: str) -> tuple[Selection | None, str]:
    try:
        return solve(problem, solver), ""
    except (InternalError, SelectionError) as error:
        return None, str(error)


def _engines(selection: Selection) -> dict[str, int]:
    counts: dict[str, int] = {}
    for candidate in selection.chosen:
        counts[candidate.config.engine] = counts.get(candidate.config.engine, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
