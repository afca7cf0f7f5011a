"""Ties go to engines that start quickly: planted times of two nodes and of both as one region."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.problem import EngineConfig
from convoy.selection import Candidate, RegionNodes, Selection, SelectionProblem, quick_start, solve
from convoy.selection.quick_start import TIE, prefer_quick_start

SLOW = frozenset({"slow", "slow.too"})
A, B, BOTH = range(3)


def offered(*candidates: tuple[int, str, float, float], budget: int | None = None) -> SelectionProblem:
    """Two nodes in a row; candidates as (region, engine, time, spread). PyTorch takes 20 us for each; `slow` needs no memory."""
    values = dict.fromkeys(("x", "a", "b"), ("nchw",))
    made = [
        Candidate(region, "p", EngineConfig(engine), "nchw", us, spread, workspace_bytes=0 if engine in SLOW else 9)
        for region, engine, us, spread in candidates
    ]
    stock = [Candidate(at, "p", EngineConfig("aten"), "nchw", 20.0, 0.1, 9, baseline=True) for at in (A, B)]
    return SelectionProblem(
        nodes=("a", "b"),
        inputs=("x",),
        outputs=("b",),
        regions=(
            RegionNodes("op(a)", ("a",), ("x",), ("a",)),
            RegionNodes("op(b)", ("b",), ("a",), ("b",)),
            RegionNodes("glue(a+b)", ("a", "b"), ("x",), ("b",)),
        ),
        candidates=(*stock, *made),
        value_layouts=values,
        value_bytes=dict.fromkeys(values, 0),
        convert_us={},
        memory_budget_bytes=budget,
    )


def taken(problem: SelectionProblem, *, net_share: float = 0.0) -> tuple[list[str], Selection, Selection]:
    """The engines that run, the choice, and the one that only time decides."""
    first = solve(problem, "exact")
    chosen = prefer_quick_start(problem, first, SLOW, net_share=net_share)
    return [candidate.config.engine for candidate in chosen.chosen], chosen, first


@pytest.mark.parametrize(
    ("spread", "other_us", "winner"),
    [
        (0.0, 10.0 * (1 + 0.9 * TIE), "quick"),
        (0.0, 10.0 * (1 + 1.1 * TIE), "slow"),
        (0.5, 10.4, "quick"),
        (0.5, 10.6, "slow"),
        (0.0, 9.9, "quick"),
    ],
)
def test_within_the_spread_or_two_percent_the_one_that_loads_at_once_wins(
    spread: float, other_us: float, winner: str
) -> None:
    engines, chosen, first = taken(offered((A, "slow", 10.0, spread), (A, "quick", other_us, 0.0)))
    assert engines == [winner, "aten"]
    assert chosen.solver == "exact"
    assert chosen.bound_us == first.bound_us <= chosen.total_us  # no better choice is hidden


def test_pytorchs_own_may_be_the_one_that_loads_at_once() -> None:
    assert taken(offered((A, "slow", 19.7, 0.0)))[0] == ["aten", "aten"]
    assert taken(offered((A, "slow", 19.5, 0.0)))[0] == ["slow", "aten"]


def test_all_go_or_none() -> None:
    """One executable that a compiler loads takes as long to start as two."""
    tie = (A, "slow", 10.0, 0.0), (A, "quick", 10.1, 0.0)
    assert taken(offered(*tie, (B, "slow.too", 10.0, 0.0), (B, "quick", 15.0, 0.0)))[0] == ["slow", "slow.too"]
    assert taken(offered(*tie, (B, "slow.too", 10.0, 0.0), (B, "quick", 10.1, 0.0)))[0] == ["quick", "quick"]


def test_a_fused_piece_may_give_way_to_two() -> None:
    assert taken(offered((BOTH, "slow", 10.0, 0.0), (A, "quick", 5.0, 0.0), (B, "quick", 5.1, 0.0)))[0] == ["quick"] * 2


def test_what_has_no_place_in_memory_is_no_tie() -> None:
    tie = (A, "slow", 10.0, 0.0), (A, "quick", 10.1, 0.0), (B, "slow", 10.0, 0.0)
    assert taken(offered(*tie, (B, "quick", 10.1, 0.0), budget=5))[0] == ["slow", "slow"]


def test_a_share_of_the_whole_time_counts_where_it_is_given() -> None:
    problem = offered((A, "slow", 10.0, 0.0), (A, "quick", 10.25, 0.0))
    assert taken(problem)[0] == ["slow", "aten"]
    assert taken(problem, net_share=0.01)[0] == ["quick", "aten"]
    assert taken(problem, net_share=0.008)[0] == ["slow", "aten"]


def test_a_node_that_only_slow_engines_compute_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = offered((A, "slow", 10.0, 0.0), (B, "slow", 10.0, 0.0), (B, "quick", 10.1, 0.0))
    problem = replace(problem, candidates=tuple(c for c in problem.candidates if not c.baseline))
    first = solve(problem, "exact")
    monkeypatch.setattr(quick_start, "solve", lambda *_: pytest.fail("it has no solution"))
    assert prefer_quick_start(problem, first, SLOW) is first


def test_a_choice_that_starts_quickly_is_left_as_it_is() -> None:
    _, chosen, first = taken(offered((A, "slow", 10.0, 0.0), (A, "quick", 9.0, 0.0)))
    assert chosen is first
