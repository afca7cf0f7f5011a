"""Side work in a smaller form, and what it may replace."""

from __future__ import annotations

from convoy.plan import Step
from convoy.problem import EngineConfig, Knobs
from convoy.schedule import alternative_steps, use_smaller_configs
from convoy.selection import Candidate, RegionNodes, SelectionProblem


def config(number: int) -> EngineConfig:
    return EngineConfig("aten", number, Knobs())


def step(name: str, args: tuple[str, ...], us: float, number: int = 1) -> Step:
    return Step("region", "op", (name,), args, (name,), f"p.{name}", config(number), "nhwc", us)


CHAIN = (step("a", ("x",), 10.0), step("b", ("a",), 10.0), step("side", ("x",), 8.0))


def offered(*more: Candidate) -> SelectionProblem:
    regions = tuple(RegionNodes(f"op({one.nodes[0]})", one.nodes, one.args, one.results) for one in CHAIN)
    chosen = [Candidate(i, one.problem, one.config, "nhwc", one.median_us) for i, one in enumerate(CHAIN)]
    return SelectionProblem(("a", "b", "side"), ("x",), ("b",), regions, (*chosen, *more), {}, {}, {})


def test_the_next_best_of_each_step_is_looked_at():
    problem = offered(
        Candidate(2, "p.side", config(2), "nhwc", 9.0, workspace_bytes=7),
        Candidate(2, "p.side", config(3), "nhwc", 11.0),
        Candidate(2, "p.side", config(4), "nhwc", 13.0),  # more than half as slow again
        Candidate(2, "p.side", config(5), "nchw", 8.5),  # in another memory format
        Candidate(0, "p.a", config(6), "nhwc", 0.0),  # written in place by others: not here
        Candidate(0, "p.a", config(7), "nhwc", 12.0),
    )
    first, second = alternative_steps(CHAIN, problem, count=3)
    assert [(one.config.version, one.median_us, one.workspace_bytes) for one in first] == [
        (7, 12.0, 0),
        (1, 10.0, 0),
        (2, 9.0, 7),
    ]
    assert [one.config.version for one in second] == [1, 1, 3]
    assert alternative_steps(CHAIN, offered()) == []


def test_side_work_alone_is_replaced_and_only_by_clearly_less():
    variant = (step("a", ("x",), 10.0, 2), step("b", ("a",), 12.0, 2), step("side", ("x",), 10.0, 2))
    shares = (1.0, 1.0, 1.0)
    steps, taken = use_smaller_configs(CHAIN, shares, [(variant, (0.1, 0.1, 0.5))])
    assert [one.config.version for one in steps] == [1, 1, 2]
    assert taken == (1.0, 1.0, 0.5)
    assert use_smaller_configs(CHAIN, shares, [(variant, (0.1, 0.1, 0.75))]) == (
        CHAIN,
        shares,
    )  # 7.5 of 8 is not worth it
    assert use_smaller_configs(CHAIN, shares, [(variant, (0.1, 0.1, 0.0))]) == (CHAIN, shares)  # nothing was seen of it
    assert use_smaller_configs(CHAIN, shares, []) == (CHAIN, shares)
