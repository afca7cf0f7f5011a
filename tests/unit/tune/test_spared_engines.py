"""A first answer asks a library only about layers whose choice may change: planted rows of a library and of another engine."""

from __future__ import annotations

from typing import Any

import pytest

from convoy.measurement import protocol_for
from convoy.perfdb.row import Measurement, Status
from convoy.problem import ConvProblem, EngineConfig, Knobs, LinearProblem, Problem
from convoy.settings import Effort, Settings
from convoy.target import Target
from convoy.tune import SearchResult, search
from convoy.tune.tuning_task import NOT_ASKED
from tests.unit.tune.test_tuning_task import Fake

GPU = Target("cuda", "test", "sm_90", 132, 1 << 34, 0)
CONV = ConvProblem(1, 8, 9, 9, 8, 3, 3, 1, 1)


class Library(Fake):
    """Offers two plans, and counts how often it is asked."""

    asks_library = True

    def __init__(self) -> None:
        super().__init__("library", 2)
        self.asked = 0

    def supports(self, problem: Problem, target: Target) -> Any:
        self.asked += 1
        return super().supports(problem, target)


def found(
    fakes: Any, database: Any, rows: dict[tuple[str, int], float], problem: Problem = CONV, **settings: Any
) -> tuple[SearchResult, int]:
    """The result of a search with planted times, by engine and knob, and how often the library was asked."""
    library = Library()
    ids = fakes(Fake("aten"), library, Fake("ours", 1, estimate=lambda k: 5.0))
    effort = settings.setdefault("effort", Effort.NONE)
    protocol = protocol_for(effort, GPU.device).id
    planted = [
        Measurement(problem.key, EngineConfig(engine, 1, Knobs.of(k=k)), GPU.digest, protocol, Status.OK, 9, us)
        for (engine, k), us in rows.items()
    ]
    database.put(planted, {}, targets=(GPU,))
    result = search(
        [problem], engine_ids=ids, target=GPU, settings=Settings(**settings), database=database, runner=None  # type: ignore[arg-type]
    )  # fmt: skip
    return result, library.asked


def configs(result: SearchResult, problem: Problem = CONV) -> list[tuple[str, Any]]:
    return sorted((row.config.engine, row.config.knobs["k"]) for row in result.rows[problem.key])


def test_where_another_engine_is_as_fast_as_its_rows_a_library_is_not_asked(fakes: Any, database: Any) -> None:
    rows = {("aten", 0): 9.0, ("ours", 0): 3.0, ("library", 0): 3.0, ("library", 7): 4.0}
    result, asked = found(fakes, database, rows)
    assert asked == 0
    assert configs(result) == [("aten", 0), ("library", 0), ("library", 7), ("ours", 0)]
    assert result.refusals[CONV.key] == {}
    assert (result.from_database, result.predicted) == (4, 0)


def test_where_it_has_no_row_the_plan_says_why(fakes: Any, database: Any) -> None:
    result, asked = found(fakes, database, {("aten", 0): 9.0, ("ours", 0): 3.0})
    assert (asked, configs(result)) == (0, [("aten", 0), ("ours", 0)])
    assert result.refusals[CONV.key] == {"library": NOT_ASKED}


def test_where_its_row_is_the_best_it_says_whether_the_plan_is_still_there(fakes: Any, database: Any) -> None:
    rows = {("aten", 0): 9.0, ("ours", 0): 3.0, ("library", 1): 2.9, ("library", 7): 2.0}
    result, asked = found(fakes, database, rows)
    assert asked == 1
    assert configs(result) == [("aten", 0), ("library", 1), ("ours", 0)]


@pytest.mark.parametrize(
    "rows",
    [
        {},
        {("ours", 0): 3.0},  # the baseline is to be predicted
        {("aten", 0): 9.0},  # so is the other engine
        {("aten", 0): 1.0, ("library", 0): 2.0},  # the choice of a format looks for measured engines beside PyTorch
    ],
)
def test_where_something_is_not_known_it_is_asked(
    fakes: Any, database: Any, rows: dict[tuple[str, int], float]
) -> None:
    assert found(fakes, database, rows)[1] == 1


KNOWN = {("aten", 0): 9.0, ("ours", 0): 3.0, ("library", 0): 4.0}


@pytest.mark.parametrize(
    "settings",
    [
        {"deterministic": True},
        {"memory_budget_bytes": 1 << 20},
        {"only_engines": ("library", "ours")},
        {"solver": "single", "only_engines": ("ours", "library")},
        {"solver": "baseline"},
    ],
)
def test_where_a_slower_candidate_may_be_chosen_it_is_asked(
    fakes: Any, database: Any, settings: dict[str, Any]
) -> None:
    assert found(fakes, database, KNOWN, **settings)[1] >= 1


def test_a_problem_that_no_library_is_asked_about_is_not_spared(fakes: Any, database: Any) -> None:
    assert found(fakes, database, KNOWN, LinearProblem(2, 8, 4))[1] == 1


def test_a_row_of_an_older_version_is_no_row(fakes: Any, database: Any) -> None:
    protocol = protocol_for(Effort.NONE, GPU.device).id
    old = Measurement(CONV.key, EngineConfig("library", 0, Knobs.of(k=0)), GPU.digest, protocol, Status.OK, 9, 1.0)
    database.put([old], {}, targets=(GPU,))
    result, asked = found(fakes, database, {("aten", 0): 9.0, ("ours", 0): 3.0})
    assert (asked, configs(result)) == (0, [("aten", 0), ("ours", 0)])
