"""The solvers against brute force on random nets: residuals, overlapping fused regions, layouts, several outputs, budgets."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import replace

import pytest

from convoy.errors import InputError, InternalError, SelectionError
from convoy.problem import EngineConfig
from convoy.selection import Candidate, LayoutCopy, RegionNodes, Selection, SelectionProblem, solve
from convoy.selection.finalize import finalize_selection
from convoy.selection.order import LaunchOrder

LAYOUTS = ("nchw", "nhwc")


def random_problem(seed: int) -> SelectionProblem:
    """A net of a few nodes, each with its own region in both layouts, and fused regions of neighbours."""
    rng = random.Random(seed)
    count = rng.randint(2, 5)
    nodes = [f"n{i}" for i in range(count)]
    reads = {
        node: sorted({rng.choice(["x", *nodes[:i]]) for _ in range(rng.randint(1, 2))}) for i, node in enumerate(nodes)
    }
    users = {value: [n for n in nodes if value in reads[n]] for value in ["x", *nodes]}
    outputs = tuple(n for n in nodes if not users[n] or rng.random() < 0.2)
    regions = [RegionNodes(f"op({n})", (n,), tuple(reads[n]), (n,)) for n in nodes]
    for a, b in itertools.pairwise(nodes):
        if users[a] == [b] and a not in outputs:
            args = tuple(dict.fromkeys([*reads[a], *(v for v in reads[b] if v != a)]))
            regions.append(RegionNodes(f"glue({a}+{b})", (a, b), args, (b,)))
    candidates: list[Candidate] = []
    for index, region in enumerate(regions):
        for layout in LAYOUTS:
            candidates += [
                Candidate(
                    region=index,
                    problem="p",
                    config=EngineConfig(engine),
                    layout=layout,
                    median_us=float(rng.randint(1, 20)),
                    workspace_bytes=rng.choice([0, 0, 50, 200]),
                    resident_bytes=rng.choice([0, 0, 30]),
                    baseline=engine == "aten" and layout == "nchw" and len(region.nodes) == 1,
                )
                for engine in ("aten", "fast")[: rng.randint(1, 2)]
            ]
    values = ["x", *nodes]
    pairs = [(v, a, b) for v in values for a in LAYOUTS for b in LAYOUTS if a != b]
    return SelectionProblem(
        nodes=tuple(nodes),
        inputs=("x",),
        outputs=outputs,
        regions=tuple(regions),
        candidates=tuple(candidates),
        value_layouts=dict.fromkeys(values, LAYOUTS),
        value_bytes={v: rng.randint(1, 4) * 10 for v in values},
        convert_us={pair: float(rng.randint(1, 6)) for pair in pairs},
        border={"x": "nchw", **dict.fromkeys(outputs, "nchw")},
        copies={pair: LayoutCopy("layout", EngineConfig("aten")) for pair in pairs},
    )


def all_choices(problem: SelectionProblem) -> list[Selection]:
    """Every legal choice there is."""
    order = LaunchOrder(problem)
    found: list[Selection] = []

    def extend(left: frozenset[str], chosen: list[Candidate]) -> None:
        if not left:
            try:
                found.append(finalize_selection(problem, order, "brute", chosen))
            except SelectionError:
                return
            return
        node = min(left, key=problem.nodes.index)
        for candidate in problem.candidates:
            covered = problem.regions[candidate.region].nodes
            if node in covered and left.issuperset(covered):
                extend(left.difference(covered), [*chosen, candidate])

    extend(frozenset(problem.nodes), [])
    return found


def unbeaten(problem: SelectionProblem) -> SelectionProblem:
    """Without baselines to be beaten by more than their spread: then the least total is simply the least."""
    return replace(problem, candidates=tuple(replace(c, baseline=False) for c in problem.candidates))


@pytest.mark.parametrize("block", range(8))
def test_exact_is_the_optimum(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        problem = unbeaten(random_problem(seed))
        best = min(choice.total_us for choice in all_choices(problem))
        found = solve(problem, "exact")
        assert found.total_us == pytest.approx(best), seed
        assert found.bound_us <= found.total_us + 1e-6
        assert found.bound_us == pytest.approx(best), seed
        assert solve(problem, "greedy").total_us >= best - 1e-6


def test_the_oracle_notices_a_solver_that_forgets_conversions() -> None:
    missed = 0
    for seed in range(40):
        problem = unbeaten(random_problem(seed))
        free = replace(problem, convert_us=dict.fromkeys(problem.convert_us, 0.0))
        blind = solve(free, "exact")
        paid = finalize_selection(problem, LaunchOrder(problem), "blind", blind.chosen)
        missed += paid.total_us > min(choice.total_us for choice in all_choices(problem)) + 1e-6
    assert missed > 5


def test_a_node_that_is_covered_twice_is_refused() -> None:
    problem = random_problem(1)
    first = next(c for c in problem.candidates if c.region == 0)
    with pytest.raises(SelectionError, match="twice"):
        finalize_selection(problem, LaunchOrder(problem), "planted", [first, *solve(problem, "exact").chosen])


def test_a_choice_under_a_budget_fits_it_and_a_budget_too_small_names_one_that_works() -> None:
    for seed in range(40):
        problem = unbeaten(random_problem(seed))
        free = solve(problem, "exact")
        with pytest.raises(SelectionError, match="at least") as caught:
            solve(replace(problem, memory_budget_bytes=1), "exact")
        least = int(str(caught.value).split("at least ")[1].split()[0])
        fitted = solve(replace(problem, memory_budget_bytes=least), "exact")
        assert fitted.peak_bytes <= least
        assert fitted.total_us >= free.total_us - 1e-6


def test_baseline_and_single() -> None:
    for seed in range(30):
        problem = random_problem(seed)
        plain = solve(problem, "baseline")
        assert all(c.baseline for c in plain.chosen)
        assert solve(problem, "exact").total_us <= plain.total_us + 1e-6
        if any(c.config.engine == "fast" for c in problem.candidates):
            able = {c.region for c in problem.candidates if c.config.engine == "fast"}
            try:
                single = solve(problem, "single:fast")
            except SelectionError:
                continue
            for c in single.chosen:
                assert c.config.engine == "fast" or c.region not in able


def test_a_challenger_within_the_spread_does_not_replace_the_baseline() -> None:
    region = RegionNodes("op(n)", ("n",), ("x",), ("n",))
    base = Candidate(0, "p", EngineConfig("aten"), "nchw", 10.0, 1.0, baseline=True)
    near = Candidate(0, "p", EngineConfig("fast"), "nchw", 9.5, 1.0)
    problem = SelectionProblem(
        ("n",), ("x",), ("n",), (region,), (base, near), dict.fromkeys("xn", LAYOUTS), {"x": 1, "n": 1}, {}
    )
    assert solve(problem).chosen == (base,)
    clear = replace(near, median_us=8.5)
    assert solve(replace(problem, candidates=(base, clear))).chosen == (clear,)


def test_unknown_solvers_and_engines_are_named() -> None:
    with pytest.raises(InputError, match="solver"):
        solve(random_problem(0), "magic")
    with pytest.raises(InputError, match="nobody"):
        solve(random_problem(0), "single:nobody")


def broken_problems() -> dict[str, SelectionProblem]:
    """One problem for each kind of contradiction, by the field that has it."""
    good = random_problem(0)
    region, candidate = good.regions[0], good.candidates[0]
    value = region.results[0]

    def region_with(**fields: tuple[str, ...]) -> tuple[RegionNodes, ...]:
        return (replace(region, **fields), *good.regions[1:])

    def candidates_with(**fields: float) -> tuple[Candidate, ...]:
        return (replace(candidate, **fields), *good.candidates[1:])

    return {
        "nodes of": replace(good, nodes=(*good.nodes, good.nodes[0])),
        "inputs of": replace(good, inputs=(good.inputs[0], good.inputs[0])),
        "regions[0].nodes": replace(good, regions=region_with(nodes=("nobody",))),
        "regions[0].results": replace(good, regions=region_with(results=(value, value))),
        "regions[0].args": replace(good, regions=region_with(args=("nobody",))),
        "outputs": replace(good, outputs=("nobody",)),
        "value_bytes": replace(good, value_bytes=good.value_bytes | {value: -1}),
        "value_layouts": replace(good, value_layouts={**good.value_layouts, value: ()}),
        "border": replace(good, border={**good.border, value: "blocked"}),
        "convert_us": replace(good, convert_us={(value, "nchw", "nhwc"): math.nan}),
        "candidates[0].region": replace(good, candidates=candidates_with(region=len(good.regions))),
        "candidates[0].median_us": replace(good, candidates=candidates_with(median_us=math.nan)),
        "candidates of": replace(good, candidates=()),
    }


@pytest.mark.parametrize("field", broken_problems())
def test_a_problem_that_contradicts_itself_blames_no_argument(field: str) -> None:
    with pytest.raises(InternalError, match=rf"^selection: {re.escape(field)}.*no argument is wrong") as caught:
        solve(broken_problems()[field])
    assert not isinstance(caught.value, InputError)


def test_a_memory_budget_that_is_no_size_is_the_users() -> None:
    with pytest.raises(InputError, match="memory_budget_bytes: got -1, expected a positive number of bytes"):
        solve(replace(random_problem(0), memory_budget_bytes=-1))
