"""The input of selection: the rows that become candidates, the copies between memory formats, and the baseline."""

from __future__ import annotations

from convoy.engines.activation_sparsity import SparsityBucket, SparsityShares
from convoy.graph.ir import Graph
from convoy.graph.text import parse_graph
from convoy.perfdb import Measurement, Status
from convoy.pipeline.selection_input import (
    MOST_CANDIDATES,
    clearly_faster,
    distinct_problems,
    fast_or_small,
    image_values,
    layout_problems,
    selection_problem,
    zeros_by_problem,
)
from convoy.problem import EngineConfig, Knobs, LayoutProblem, Problem
from convoy.regions import Region, propose
from convoy.selection import SelectionProblem

LAYOUTS = ("nchw", "nhwc")
GRAPH = parse_graph(
    """graph 1
input %x: fp32[2,3,8,8]
constant %w: fp32[4,3,3,3]
constant %b: fp32[4]
constant %v: fp32[5,256]
%c: fp32[2,4,8,8] = conv2d(%x, %w, %b, (1, 1), (1, 1), (1, 1), 1)
%a: fp32[2,4,8,8] = aten.relu.default(%c)
%f: fp32[2,256] = aten.view.default(%a, (2, 256))
%l: fp32[2,5] = linear(%f, %v, None)
return %l, %a
"""
)
REGIONS = propose(GRAPH, layouts=LAYOUTS, numerics="strict")
COPIES = layout_problems(GRAPH, LAYOUTS)


def region(name: str) -> Region:
    (found,) = [r for r in REGIONS if r.id == name]
    return found


def row(problem: Problem, median_us: float, engine: str = "aten", **more: object) -> Measurement:
    knobs = more.pop("knobs", {})
    config = EngineConfig(engine, 1, Knobs.of(**knobs))  # type: ignore[arg-type]
    status = Status.OK if median_us else Status.TIMEOUT
    return Measurement(problem.key, config, "0" * 16, "p-1", status, 5, median_us, 0.1, **more)  # type: ignore[arg-type]


def offered(*rows: Measurement, graph: Graph = GRAPH, layouts: tuple[str, ...] = LAYOUTS) -> SelectionProblem:
    by_key: dict[str, list[Measurement]] = {}
    for found in rows:
        by_key.setdefault(found.problem, []).append(found)
    return selection_problem(
        graph, REGIONS, COPIES, by_key, layouts=layouts, border={"x": "nchw", "a": "nchw"}, memory_budget_bytes=99
    )


def test_images_are_the_values_with_a_memory_format() -> None:
    assert image_values(GRAPH) == ["x", "c", "a"]


def test_every_copy_between_the_formats_is_a_problem() -> None:
    assert set(COPIES) == {(v, s, t) for v in ("x", "c", "a") for s in LAYOUTS for t in LAYOUTS if s != t}
    assert COPIES["c", "nchw", "nhwc"] == LayoutProblem(GRAPH.values["c"].spec, "nchw", "nhwc")
    assert layout_problems(GRAPH, ("nhwc",)) == {}


def test_each_problem_is_measured_once_regions_first() -> None:
    found = distinct_problems(REGIONS, COPIES)
    keys = [problem.key for problem in found]
    assert len(keys) == len(set(keys))
    assert set(keys) == {p.key for r in REGIONS for p in r.problems} | {p.key for p in COPIES.values()}
    assert keys[0] == REGIONS[0].problems[0].key
    # c and a have one shape: their copies are one problem.
    assert sum(isinstance(problem, LayoutProblem) for problem in found) == 4


def test_good_rows_become_candidates_with_their_figures() -> None:
    first, second = region("conv(c+a)").problems
    problem = offered(
        row(first, 9.0, "onednn", workspace_bytes=7, resident_bytes=1000, knobs={"weight": "packed"}),
        row(second, 8.0, "onednn", resident_bytes=10),
        row(first, 0.0, "gemm", reason="30 s"),
    )
    names = [cover.id for cover in problem.regions]
    assert [names[c.region] for c in problem.candidates] == ["conv(c+a)", "conv(c+a)"]
    one, other = problem.candidates
    assert (one.layout, one.median_us, one.spread_us, one.workspace_bytes) == ("nchw", 9.0, 0.1, 7)
    assert str(one.config.knobs) == "weight=packed"
    # What a packed weight needs beyond the original, which is 4 x 3 x 3 x 3 and 4 values of 4 bytes.
    assert one.resident_bytes == 1000 - (4 * 27 + 4) * 4
    assert (other.layout, other.resident_bytes) == ("nhwc", 0)
    assert problem.memory_budget_bytes == 99
    assert problem.border == {"x": "nchw", "a": "nchw"}


def test_the_baseline_is_aten_on_one_node_in_the_callers_format() -> None:
    alone, fused, linear = region("conv(c)").problems, region("conv(c+a)").problems, region("linear(l)").problems
    rows = [row(p, 5.0) for p in (*alone, *fused, *linear)] + [row(alone[0], 1.0, "onednn")]
    found = {(c.problem, c.config.engine): c.baseline for c in offered(*rows).candidates}
    assert found == {
        (alone[0].key, "aten"): True,
        (alone[1].key, "aten"): False,  # PyTorch would not change the format
        (fused[0].key, "aten"): False,  # nor fuse
        (fused[1].key, "aten"): False,
        (linear[0].key, "aten"): True,
        (alone[0].key, "onednn"): False,
    }
    turned = offered(*rows, layouts=("nhwc", "nchw"))
    assert {c.problem for c in turned.candidates if c.baseline} == {alone[1].key, linear[0].key}


def test_a_slow_baseline_is_offered_beside_the_fastest() -> None:
    problem = region("conv(c)").problems[0]
    fast = [row(problem, 1.0 + i, "gemm", knobs={"tile": i}) for i in range(MOST_CANDIDATES + 3)]
    found = offered(*fast, row(problem, 900.0)).candidates
    assert [c.median_us for c in found] == [*[1.0 + i for i in range(MOST_CANDIDATES)], 900.0]
    assert [c.config.engine for c in found if c.baseline] == ["aten"]
    assert len(offered(*fast[:2], row(problem, 900.0)).candidates) == 3  # and once, not twice


def test_beyond_the_fastest_only_the_more_frugal_are_kept() -> None:
    problem = region("conv(c)").problems[0]
    needs = [100] * MOST_CANDIDATES + [100, 60, 80, 60, 10, 0]
    rows = [row(problem, 1.0 + i, "gemm", knobs={"tile": i}, workspace_bytes=b) for i, b in enumerate(needs)]
    kept = fast_or_small(rows)
    assert kept[:MOST_CANDIDATES] == rows[:MOST_CANDIDATES]
    assert [r.workspace_bytes for r in kept[MOST_CANDIDATES:]] == [60, 10, 0]
    resident = [row(problem, 1.0, resident_bytes=50)] * MOST_CANDIDATES + [row(problem, 2.0, workspace_bytes=49)]
    assert fast_or_small(resident) == resident
    assert fast_or_small([]) == []


def test_the_fastest_copy_is_the_one_offered() -> None:
    copy = COPIES["c", "nchw", "nhwc"]
    back = COPIES["c", "nhwc", "nchw"]
    found = offered(row(copy, 3.0), row(copy, 2.0, "pointwise"), row(copy, 0.0, "gemm"), row(back, 0.0))
    assert found.convert_us == {("c", "nchw", "nhwc"): 2.0, ("a", "nchw", "nhwc"): 2.0}  # of one shape
    assert found.copies["a", "nchw", "nhwc"].config.engine == "pointwise"
    assert set(found.copies) == set(found.convert_us)


def test_of_copies_that_are_predicted_alike_one_without_python_is_offered() -> None:
    copy = COPIES["c", "nchw", "nhwc"]
    found = offered(row(copy, 3.0), row(copy, 3.0, "cpu.layout"), row(copy, 3.0, "inductor"))
    assert found.copies["c", "nchw", "nhwc"].config.engine == "cpu.layout"


def test_sizes_and_formats_of_values() -> None:
    found = offered()
    assert found.value_layouts == dict.fromkeys(("x", "c", "a"), LAYOUTS)
    assert found.value_bytes == {"x": 1536, "c": 2048, "a": 2048, "f": 2048, "l": 40}
    assert (found.inputs, found.outputs, found.nodes) == (("x",), ("l", "a"), ("c", "a", "f", "l"))


def test_an_engine_that_skips_zeros_is_offered_with_its_time_for_the_zeros_that_there_are() -> None:
    problem = region("conv(c+a)").problems[0]
    rows = {
        problem.key: [
            row(problem, 9.0),
            *(row(problem, 10.0 - z / 10, "skip", knobs={"zeros": z}) for z in (0, 70, 90)),
        ]
    }

    def times(zeros: dict[str, SparsityShares] | None, *, clearly_faster_only: bool = True) -> list[float]:
        border = {"x": "nchw", "a": "nchw"}
        found = selection_problem(
            GRAPH,
            REGIONS,
            COPIES,
            rows,
            layouts=LAYOUTS,
            border=border,
            zeros=zeros,
            clearly_faster_only=clearly_faster_only,
        )
        return [c.median_us for c in found.candidates if c.config.engine == "skip"]

    assert times({"x": SparsityShares(0.75)}) == [3.0]
    assert times({"x": SparsityShares(0.99)}) == [], "nothing was measured for so many"
    assert times({}) == times(None) == [], "slower than what holds for any input"
    assert times(None, clearly_faster_only=False) == [10.0], "but on offer where one engine is asked for"


def test_what_holds_for_some_inputs_must_be_clearly_faster() -> None:
    problem = region("conv(c+a)").problems[0]
    rows = [row(problem, us, "skip", knobs={"zeros": 50, "k": int(10 * us)}) for us in (9.6, 9.8)]
    dense = row(problem, 10.0)
    assert clearly_faster([*rows, dense]) == [rows[0], dense]
    assert clearly_faster(rows) == rows, "there is no other"
    channels = row(problem, 9.8, "live", knobs={"dead_channels": 10})
    assert clearly_faster([channels, dense]) == [dense]


def test_problems_are_measured_for_the_shares_of_all_layers_that_have_them() -> None:
    found = zeros_by_problem(REGIONS, {"x": SparsityShares(0.75, 0.3)})
    assert set(found) == {p.key for r in REGIONS if r.pattern == "conv" for p in r.problems}
    assert all(levels == {SparsityBucket(70, 30)} for levels in found.values())
    assert zeros_by_problem(REGIONS, {}) == {}


JOINED = parse_graph(
    """graph 1
input %x: fp32[1,4,3,3]
constant %w: fp32[8,4,1,1]
constant %v: fp32[4,4,1,1]
%a: fp32[1,8,3,3] = conv2d(%x, %w, None, (1, 1), (0, 0), (1, 1), 1)
%b: fp32[1,4,3,3] = conv2d(%x, %v, None, (1, 1), (0, 0), (1, 1), 1)
%c: fp32[1,12,3,3] = aten.cat.default((%a, %b), 1)
return %c
"""
)


def concatenation(engine: str) -> list[tuple[str, float, bool]]:
    """The candidates for the concatenation: layout, time and whether it is predicted; `b` is made by an engine."""
    found = propose(JOINED, layouts=LAYOUTS, numerics="strict")
    rows: dict[str, list[Measurement]] = {}
    for r in found:
        for problem in r.problems:
            name = engine if r.nodes == ("b",) else "aten" if r.pattern == "op" else "triton.swapped"
            rows[problem.key] = [row(problem, 9.0), row(problem, 2.0, name)]
    made = selection_problem(
        JOINED, found, layout_problems(JOINED, LAYOUTS), rows, layouts=LAYOUTS, border={"x": "nhwc", "c": "nhwc"}
    )
    index = next(i for i, r in enumerate(found) if r.nodes == ("c",))
    return [(c.layout, c.median_us, c.predicted) for c in made.candidates if c.region == index and c.median_us < 9]


def test_a_concatenation_of_pieces_that_are_written_in_place_may_cost_nothing() -> None:
    assert concatenation("triton.pointwise") == [("nchw", 2.0, False), ("nhwc", 2.0, False), ("nhwc", 0.0, True)]


def test_a_piece_whose_fastest_maker_cannot_keeps_the_price() -> None:
    assert concatenation("cudnn") == [("nchw", 2.0, False), ("nhwc", 2.0, False)]
