"""exact against every choice there is, memory included; at the size of a real net; and when time runs out."""

from __future__ import annotations

import importlib
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from convoy.errors import SelectionError
from convoy.selection import SelectionProblem, solve
from convoy.selection.exact import minimum_memory
from convoy.selection.finalize import finalize_selection
from convoy.selection.order import LaunchOrder

SMALL_NETS = Path(__file__).with_name("small_nets.py")


@pytest.fixture
def nets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SMALL_NETS.parent))
    return importlib.import_module("small_nets")


@pytest.mark.parametrize("block", range(6))
def test_the_least_total_of_all_choices_is_found_or_there_is_none(nets: ModuleType, block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        problem = nets.random_net(seed)
        every = list(nets.outcomes(problem))
        if not every:
            with pytest.raises(SelectionError):
                solve(problem)
            continue
        found = solve(problem)
        best = min(outcome.total_us for outcome in every)
        assert found.total_us == pytest.approx(best, abs=1e-6), seed
        assert found.gap == 0.0, seed


@pytest.mark.parametrize("block", range(6))
def test_the_least_total_of_all_that_fit_a_budget_is_found(nets: ModuleType, block: int) -> None:
    tight = 0
    for seed in range(block * 25, block * 25 + 25):
        problem = nets.random_net(seed, most_nodes=5)
        every = list(nets.outcomes(problem))
        peaks = sorted({outcome.peak_bytes for outcome in every if outcome.peak_bytes > 0})
        free = min((outcome.total_us for outcome in every), default=0.0)
        for budget in peaks[:: max(1, len(peaks) // 3)]:
            best = min(outcome.total_us for outcome in every if outcome.peak_bytes <= budget)
            found = solve(replace(problem, memory_budget_bytes=budget))
            assert found.peak_bytes <= budget, (seed, budget)
            assert found.total_us == pytest.approx(best, abs=1e-6), (seed, budget)
            tight += best > free
    assert tight > 10


@pytest.mark.parametrize("block", range(4))
def test_the_least_memory_is_that_of_the_most_frugal_choice(nets: ModuleType, block: int) -> None:
    counted = 0
    for seed in range(block * 25, block * 25 + 25):
        problem = nets.random_net(seed, most_nodes=5)
        every = list(nets.outcomes(problem))
        if not every or LaunchOrder(problem).contradictions:
            continue
        counted += 1
        assert minimum_memory(problem).peak_bytes == min(outcome.peak_bytes for outcome in every), seed
    assert counted > 10


def test_a_solver_that_forgets_memory_is_noticed(nets: ModuleType) -> None:
    missed = 0
    for seed in range(60):
        problem = nets.random_net(seed, most_nodes=5)
        every = list(nets.outcomes(problem))
        if every:
            blind = solve(problem)
            missed += blind.peak_bytes > min(outcome.peak_bytes for outcome in every)
            assert (
                finalize_selection(problem, LaunchOrder(problem), "again", blind.chosen).peak_bytes == blind.peak_bytes
            )
    assert missed > 10


@pytest.fixture(scope="module")
def densenet201() -> SelectionProblem:
    """DenseNet-201's own graph and regions with drawn times, 4 candidates in each of two memory formats."""
    patch = pytest.MonkeyPatch()
    bench = importlib.import_module("bench.tuning.selection")
    patch.undo()
    return bench.drawn_problem(bench.densenet201(64), 0, 4)


@pytest.mark.xdist_group("densenet201")
def test_densenet201_is_solved_to_the_optimum(densenet201: SelectionProblem) -> None:
    assert len(densenet201.nodes) > 600
    counts = Counter(c.region for c in densenet201.candidates)
    assert all(counts[region] >= 4 for region in range(len(densenet201.regions)))
    assert statistics.median(counts.values()) == 8
    found, greedy = solve(densenet201), solve(densenet201, "greedy")
    assert found.gap == 0.0
    assert found.total_us < greedy.total_us
    assert solve(densenet201) == found


@pytest.mark.xdist_group("densenet201")
def test_densenet201_under_a_budget_is_solved_to_the_optimum(densenet201: SelectionProblem) -> None:
    free = solve(densenet201)
    budget = free.peak_bytes * 3 // 4
    found = solve(replace(densenet201, memory_budget_bytes=budget))
    assert found.peak_bytes <= budget
    assert found.gap == 0.0
    greedy = solve(replace(densenet201, memory_budget_bytes=budget), "greedy")
    assert free.total_us <= found.total_us < greedy.total_us


@pytest.mark.xdist_group("densenet201")
def test_time_that_is_up_gives_a_choice_that_fits_and_an_honest_bound(densenet201: SelectionProblem) -> None:
    budget = solve(densenet201).peak_bytes * 3 // 4
    found = solve(replace(densenet201, memory_budget_bytes=budget), time_limit_s=0.3)
    assert found.peak_bytes <= budget
    assert found.bound_us <= found.total_us


@pytest.mark.xdist_group("densenet201")
def test_a_budget_that_is_too_small_is_refused_in_the_time_given(densenet201: SelectionProblem) -> None:
    with pytest.raises(SelectionError, match=r"memory_budget_bytes: 1000 bytes are too few.*at least \d+ bytes"):
        solve(replace(densenet201, memory_budget_bytes=1000), time_limit_s=2.0)
