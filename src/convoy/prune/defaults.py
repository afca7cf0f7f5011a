"""Measure engines with their default knobs only: enough for a curve over sparsity, with a third of a search's builds."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.base import Engine
from convoy.measurement import Request, Runner, protocol_for
from convoy.measurement.engine_space import query_engine
from convoy.perfdb import Database, Measurement
from convoy.problem import Problem
from convoy.settings import Settings
from convoy.target import Target
from convoy.tune import SearchResult
from convoy.tune.prior_rows import SearchProgress
from convoy.tune.staged_search import describe_problem


def measure_defaults(
    problems: Sequence[Problem],
    engines: Sequence[Engine],
    *,
    target: Target,
    settings: Settings,
    database: Database,
    runner: Runner,
    on_progress: SearchProgress,
) -> SearchResult:
    """One row for each problem and each engine that supports it. Rows in the database are reused; failures are rows too.

    Rows that the database holds for other knobs of these engines are added to the result.

    Args:
        problems: to measure.
        engines: that compete.
        target: the device.
        settings: its effort selects the protocol.
        database: where rows come from and go to.
        runner: measures candidates.
        on_progress: called with (done, total, current problem).
    """
    protocol = protocol_for(settings.effort, target.device)
    found: dict[str, list[Measurement]] = {}
    refusals: dict[str, dict[str, str]] = {}
    from_database = measured = 0
    requests: list[Request] = []
    for problem in {p.key: p for p in problems}.values():
        offers = {engine: query_engine(engine, problem, target) for engine in engines}
        refused = {engine.id: support.reason for engine, (support, _) in offers.items() if not support}
        spaces = [[engine.config(knobs) for knobs in space] for engine, (_, space) in offers.items() if space]
        valid = {config for space in spaces for config in space}
        rows = [row for row in database.measured(problem.key, target.digest, protocol.id) if row.config in valid]
        found[problem.key], refusals[problem.key] = rows, refused
        from_database += len(rows)
        known = {row.config for row in rows}
        missing = tuple(space[0] for space in spaces if space[0] not in known)
        if missing:
            requests.append(Request(problem, missing, protocol.rounds))
    runner.prepare(requests)
    for done, request in enumerate(requests):
        on_progress(done, len(requests), describe_problem(request.problem))
        for row in runner.measure(request, protocol):
            found[request.problem.key].append(row)
            measured += 1
            database.put([row], {}, targets=(target,))
    return SearchResult(found, refusals, measured, from_database)
