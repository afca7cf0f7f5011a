"""Proof: what a plan runs and nobody has measured, held to the oracle one by one, where the whole turned out to be wrong.

A measured candidate was right on data of its own before it was timed; a predicted one was never run (effort `none`, or a search
that was cut short). Both efforts promise to measure little, so that this is done only where the end-to-end check finds an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

from convoy.deadline import Deadline
from convoy.engines.manifest import BASELINE
from convoy.measurement.protocol import protocol_for
from convoy.measurement.runner import Request
from convoy.perfdb import Database
from convoy.pipeline.measure_net import make_runner
from convoy.pipeline.net import Net
from convoy.pipeline.observer import Observer
from convoy.pipeline.select import Choice
from convoy.pipeline.selection_input import distinct_problems
from convoy.pipeline.summarize import CheckOutcome
from convoy.plan import Plan
from convoy.problem import subgraph_texts
from convoy.program import Program
from convoy.settings import Settings
from convoy.tune import SearchResult


class CheckedPlan(Protocol):
    """A plan that was built and checked as a whole."""

    @property
    def plan(self) -> Plan:
        """What it runs."""
        ...

    @property
    def wrong(self) -> str:
        """Why its results are wrong; empty where they are not."""
        ...


Found = TypeVar("Found", bound=CheckedPlan)


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """A plan that was selected, built and checked as a whole.

    Attributes:
        choice: what was selected, and from what.
        plan: with its schedule.
        program: what runs it.
        outcome: times and errors beside PyTorch's own run.
        wrong: why its results are wrong; empty where they are not.
        tuned_s: seconds that measuring and selecting took.
        stock_wrong: whether PyTorch's own run is wrong beyond rounding; told of a training step.
    """

    choice: Choice
    plan: Plan
    program: Program
    outcome: CheckOutcome
    wrong: str
    tuned_s: float
    stock_wrong: bool = False


TRIES = 4
"""Most times that selection chooses again: the next choice may be predicted too."""

REBUILD_SHARE: Final = 0.5
"""Part of the time left that is kept for building and checking again."""

NO_DEADLINE: Final = Deadline()


def rebuild_until_verified(
    build: Callable[[SearchResult], Found],
    net: Net,
    found: SearchResult,
    settings: Settings,
    database: Database,
    observer: Observer,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[Found, SearchResult]:
    """Build; while the result is wrong as a whole, measure the steps that were only predicted, and select and build again.

    Args:
        build: selects from a search's result, builds and checks.
        net: what it is for.
        found: the search's result.
        settings: effort and limits.
        database: where rows are kept.
        observer: told of the progress.
        deadline: when the call must end: nothing is measured or built again after it.

    Returns:
        What the last build made, and the search's result with the measured rows in place of the predicted ones.
    """
    built = build(found)
    for _ in range(TRIES):
        if not built.wrong or deadline.is_over:
            break
        measuring = deadline.earlier(REBUILD_SHARE * deadline.left_s) if deadline.is_limited else deadline
        before = found.wrong_predictions
        found = measure_predicted(built.plan, net, found, settings, database, observer, measuring)
        if found.wrong_predictions == before:
            break
        built = build(found)
    return built, found


def measure_predicted(
    plan: Plan,
    net: Net,
    found: SearchResult,
    settings: Settings,
    database: Database,
    observer: Observer,
    deadline: Deadline = NO_DEADLINE,
) -> SearchResult:
    """Measure the steps of a plan whose candidates were only predicted, except PyTorch's own.

    Args:
        plan: what turned out to be wrong as a whole.
        net: what it is for.
        found: what is known; the rows measured now take the place of predictions.
        settings: effort and limits.
        database: where rows are kept.
        observer: told of the progress.
        deadline: when measuring ends; what has no row by then keeps its prediction.

    Returns:
        The result with the measured rows; its `wrong_predictions` count those that failed. If there are none, the steps are
        right one by one, and selecting again changes nothing.
    """
    predicted = {
        (row.problem, row.config) for rows in found.rows.values() for row in rows if row.ok and not row.samples
    }
    wanted = dict.fromkeys((step.problem, step.config) for step in plan.steps if step.config.engine != BASELINE)
    unproven = [key for key in wanted if key in predicted]
    if not unproven:
        return found
    problems = {problem.key: problem for problem in distinct_problems(net.regions, net.copies)}
    protocol = protocol_for(settings.effort, net.target.device)
    measured = dict(found.rows)
    failed = 0
    with closing(make_runner(net.target, settings, deadline)) as runner:
        requests = [Request(problems[key], (config,), protocol.few) for key, config in unproven]
        runner.prepare(requests)
        for done, request in enumerate(requests):
            if deadline.is_over:
                break
            observer("measuring predicted candidates", done, len(requests))
            rows = list(runner.measure(request, protocol))
            database.put(rows, subgraph_texts([request.problem]), targets=(net.target,))
            key = request.problem.key
            known = {row.config for row in rows}
            measured[key] = [*(row for row in measured[key] if row.config not in known), *rows]
            failed += sum(not row.ok for row in rows)
    return replace(found, rows=measured, wrong_predictions=found.wrong_predictions + failed)
