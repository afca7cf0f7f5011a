"""The cost of launches beside their own time is counted where solvers choose, and in no layer's time."""

from convoy.pipeline.launch_overhead import INTERPRETED_US, launch_us, with_launch_costs, without_launch_costs
from convoy.problem import EngineConfig
from convoy.selection import solve
from convoy.selection.problem import Candidate, LayoutCopy, RegionNodes, SelectionProblem


def problem(**changes) -> SelectionProblem:
    """Two nodes: both at once by one launch through Python, or each by a kernel in C, which takes a little longer."""
    both, first, second = (
        RegionNodes("both", ("a", "b"), ("x",), ("z",)),
        RegionNodes("first", ("a",), ("x",), ("y",)),
        RegionNodes("second", ("b",), ("y",), ("z",)),
    )
    fields = {
        "nodes": ("a", "b"),
        "inputs": ("x",),
        "outputs": ("z",),
        "regions": (both, first, second),
        "candidates": (
            Candidate(0, "both", EngineConfig("inductor"), "nhwc", 50.0),
            Candidate(1, "one", EngineConfig("cpu.direct"), "nhwc", 30.0),
            Candidate(2, "two", EngineConfig("cpu.direct"), "nhwc", 30.0),
            Candidate(1, "one", EngineConfig("aten"), "nchw", 40.0, baseline=True),
            Candidate(2, "two", EngineConfig("aten"), "nchw", 40.0, baseline=True),
        ),
        "value_layouts": dict.fromkeys("xyz", ("nchw", "nhwc")),
        "value_bytes": dict.fromkeys("xyz", 4),
        "convert_us": {(name, *way): 1.0 for name in "xyz" for way in (("nchw", "nhwc"), ("nhwc", "nchw"))},
        "copies": {
            (name, *way): LayoutCopy(f"{way}", EngineConfig("aten"))
            for name in "xyz"
            for way in (("nchw", "nhwc"), ("nhwc", "nchw"))
        },
        "border": {"x": "nhwc", "z": "nhwc"},
    }
    return SelectionProblem(**(fields | changes))


def test_kernels_in_c_win_by_what_python_costs():
    own = problem()
    alone = solve(own, "exact")
    assert [c.config.engine for c in alone.chosen] == ["inductor"]
    chosen = without_launch_costs(solve(with_launch_costs(own, "cpu"), "exact"), own, "cpu")
    assert [c.config.engine for c in chosen.chosen] == ["cpu.direct"] * 2
    assert [c.median_us for c in chosen.chosen] == [30.0, 30.0]
    assert chosen.total_us == 60.0


def test_totals_keep_what_launches_cost():
    own = problem(border={"x": "nchw", "z": "nhwc"})
    chosen = without_launch_costs(solve(with_launch_costs(own, "cpu"), "exact"), own, "cpu")
    assert [c.median_us for c in chosen.conversions] == [1.0]
    assert chosen.total_us == 61.0 + INTERPRETED_US


def test_a_gpus_launches_lie_in_a_graph():
    own = problem()
    assert with_launch_costs(own, "cuda") is own
    assert launch_us(EngineConfig("aten"), "cuda") == 0
    selection = solve(own, "exact")
    assert without_launch_costs(selection, own, "cuda") is selection
