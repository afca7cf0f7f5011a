"""The stated time of PyTorch's own step leaves out the casts of indices that capture adds. Results that need the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import convoy
from convoy.deadline import Deadline
from convoy.errors import SelectionError
from convoy.graph.text import parse_graph
from convoy.perfdb.row import Measurement, Status
from convoy.pipeline.check import end_to_end
from convoy.pipeline.net import Net
from convoy.pipeline.schedule_search import LACK_OF_TIME
from convoy.pipeline.select import compared, select, stock_us
from convoy.problem import EngineConfig, Knobs
from convoy.regions import propose
from convoy.selection import Candidate, RegionNodes, SelectionProblem, solve
from convoy.settings import Effort, Settings
from convoy.target import Target
from convoy.tune import SearchResult

TARGET = Target("cuda", "a GPU", "sm_90", 132, 80 << 30, 50 << 20)

NARROW = """graph 1
input %x: fp32[2,4,8,8]
input %dy: fp32[2,4,4,4]
%v: fp32[2,4,4,4], %i: i64[2,4,4,4] = aten.max_pool2d_with_indices.default(%x, (2, 2), (2, 2))
%n: i16[2,4,4,4] = aten._to_copy.default(%i, dtype=dtype.i16)
%w: i64[2,4,4,4] = aten._to_copy.default(%n, dtype=dtype.i64)
%dx: fp32[2,4,8,8] = aten.max_pool2d_with_indices_backward.default(%dy, %x, (2, 2), (2, 2), (0, 0), (1, 1), False, %w)
return %v, %dx
"""
WIDE = "\n".join(line for line in NARROW.splitlines() if "_to_copy" not in line).replace("%w)", "%i)") + "\n"


def offered(text: str) -> tuple[SelectionProblem, float]:
    """A baseline for each node, that of the k-th at 2 to the power k microseconds, and what PyTorch itself is said to take."""
    graph = parse_graph(text)
    nodes = tuple(node.name for node in graph.nodes)
    values = [value for value in graph.values.values() if value.kind != "constant"]
    problem = SelectionProblem(
        nodes=nodes,
        inputs=graph.inputs,
        outputs=graph.outputs,
        regions=tuple(
            RegionNodes(
                f"op({node.name})", (node.name,), tuple(dict.fromkeys(node.refs())), tuple(filter(None, node.outputs))
            )
            for node in graph.nodes
        ),
        candidates=tuple(
            Candidate(i, f"p{i}", EngineConfig("aten", 1, Knobs()), "nchw", 2.0**i, baseline=True)
            for i in range(len(nodes))
        ),
        value_layouts={value.name: ("nchw",) for value in values},
        value_bytes={value.name: value.spec.size_bytes for value in values},
        convert_us={},
    )
    baseline = solve(problem, "baseline")
    return problem, stock_us(baseline, problem, graph) - baseline.total_us


def test_casts_of_indices_are_not_pytorchs() -> None:
    problem, difference = offered(NARROW)
    assert [problem.nodes[i] for i in (1, 2)] == ["n", "w"]
    assert difference == -(2.0 + 4.0)


def test_all_else_is() -> None:
    assert offered(WIDE)[1] == 0.0


LOSS = """graph 1
input %x: fp32[2,3,4,4]
input %t: i64[2,4,4]
%s: fp32[2,3,4,4] = aten._log_softmax.default(%x, 1, False)
%l: fp32[], %w: fp32[] = aten.nll_loss2d_forward.default(%s, %t, None, 1, -100)
return %l
"""


def steady_net(*, others: bool) -> tuple[Net, SearchResult]:
    """A loss whose baseline is refused for the same bits' sake, and what was found for it, by others too or by nobody."""
    graph = parse_graph(LOSS)
    regions = propose(graph, layouts=("nchw",), numerics="as_torch")
    rows: dict[str, list[Measurement]] = {}
    refusals: dict[str, dict[str, str]] = {}
    reason = (
        "aten.nll_loss2d_forward.default may give different bits from run to run, and `deterministic` was asked for"
    )
    for region in regions:
        for problem in region.problems:
            lost = region.nodes == ("l",)
            taker = EngineConfig("inductor" if lost else "aten", 1, Knobs())
            row = Measurement(problem.key, taker, "t", "p", Status.OK, samples=9, median_us=1.0)
            rows[problem.key] = [row] if len(region.nodes) == 1 and (others or not lost) else []
            refusals[problem.key] = {"aten": reason} if lost else {}
    captured = SimpleNamespace(graph=graph)
    return Net("loss", captured, regions, ("nchw",), {}, {}, TARGET, "x"), SearchResult(rows, refusals)  # type: ignore[arg-type]


def test_an_operator_that_nobody_computes_with_the_same_bits_is_named() -> None:
    with pytest.raises(
        SelectionError, match=r"no engine computes aten\.nll_loss2d_forward\.default \(l\) with the same bits"
    ):
        select(*steady_net(others=False), Settings(deterministic=True))


def test_a_baseline_that_is_left_out_for_the_same_bits_is_noted() -> None:
    choice = select(*steady_net(others=True), Settings(deterministic=True))
    assert {c.config.engine for c in choice.selection.chosen} == {"aten", "inductor"}
    assert [
        note
        for note in choice.notes
        if note.startswith("PyTorch's own operator is left out (deterministic): aten.nll_loss2d_forward")
    ]


GATED = """graph 1
input %x: fp32[1,64,8,8]
%s: fp32[1,64,8,8] = aten.sigmoid.default(%x)
%y: fp32[1,64,8,8] = aten.mul.Tensor(%s, %x)
return %y
"""


def gated_net(times: dict[str, float], each_us: float = 5.0) -> tuple[Net, SearchResult]:
    """Two operators that PyTorch takes so long for each, and engines their planted time for both."""
    graph = parse_graph(GATED)
    regions = propose(graph, layouts=("nchw",), numerics="as_torch")
    rows: dict[str, list[Measurement]] = {}
    for region in regions:
        planted = {"aten": each_us} if len(region.nodes) == 1 else times
        for problem in region.problems:
            rows[problem.key] = [
                Measurement(problem.key, EngineConfig(engine), "t", "p", Status.OK, samples=9, median_us=us)
                for engine, us in planted.items()
            ]
    captured = SimpleNamespace(graph=graph)
    return Net("gate", captured, regions, ("nchw",), {}, {}, TARGET, "x"), SearchResult(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "settings", "winner"),
    [
        ({"inductor": 4.0, "cuda.fusion": 4.07}, Settings(), "cuda.fusion"),
        ({"inductor": 4.0, "cuda.fusion": 4.1}, Settings(), "inductor"),
        ({"inductor": 4.0, "cuda.fusion": 4.07}, Settings(only_engines=("inductor", "cuda.fusion")), "inductor"),
        ({"inductor": 4.0, "cuda.fusion": 4.07}, Settings(solver="greedy"), "cuda.fusion"),
    ],
)
def test_of_two_that_are_equally_fast_the_one_that_no_compiler_loads_is_chosen(
    times: dict[str, float], settings: Settings, winner: str
) -> None:
    choice = select(*gated_net(times), settings)
    assert [candidate.config.engine for candidate in choice.selection.chosen] == [winner]
    told = [note for note in choice.notes if note.startswith("inductor would save 0.07 us of 4.07")]
    assert len(told) == (winner == "cuda.fusion")


def test_what_leaving_a_compiler_out_costs_is_said_in_milliseconds_where_the_net_takes_some() -> None:
    choice = select(*gated_net({"inductor": 40000.0, "cuda.fusion": 40110.0}, 50000.0), Settings())
    assert [note for note in choice.notes if note.startswith("inductor would save 0.11 ms of 40.11 and must")]


@pytest.mark.parametrize(
    ("spent_s", "date", "winner"),
    [
        (0.0, "2020-01-01T00:00:00Z", "inductor"),
        (57.0, "2020-01-01T00:00:00Z", "aten"),  # of the 3 s that are left, half is for compiling, which takes 2
        (57.0, "2999-01-01T00:00:00Z", "inductor"),  # this process measured it: its code is there
    ],
)
def test_what_a_compiler_cannot_finish_in_time_is_not_chosen(spent_s: float, date: str, winner: str) -> None:
    net, found = gated_net({"inductor": 4.0})
    net = replace(net, target=replace(TARGET, device="cpu"))
    rows = {key: [replace(row, date=date) for row in of_problem] for key, of_problem in found.rows.items()}
    deadline = Deadline(60.0, iter([0.0, *[spent_s] * 100]).__next__)
    choice = select(net, replace(found, rows=rows), Settings(), deadline)
    assert {candidate.config.engine for candidate in choice.selection.chosen} == {winner}
    assert any(note.endswith(LACK_OF_TIME) for note in choice.notes) == (winner == "aten")


@pytest.mark.parametrize(
    ("effort", "device", "each_us", "winner"),
    [
        ("none", "cpu", 540.0, "aten"),  # with 100 us for each launch: 16 % slower
        ("none", "cpu", 640.0, "inductor"),  # 35 %
        ("none", "cuda", 560.0, "inductor"),
        ("quick", "cpu", 540.0, "inductor"),
    ],
)
def test_a_first_answer_on_a_cpu_waits_for_a_compiler_that_saves_much(
    effort: str, device: str, each_us: float, winner: str
) -> None:
    net, found = gated_net({"inductor": 1000.0}, each_us)
    net = replace(net, target=replace(TARGET, device=device))
    choice = select(net, found, Settings(effort=effort))
    assert {candidate.config.engine for candidate in choice.selection.chosen} == {winner}


@pytest.mark.parametrize(
    ("effort", "solver", "other_us", "winner"),
    [
        ("none", "exact", 43.5, "cuda.fusion"),  # 9 % slower, and there at once
        ("none", "greedy", 43.5, "cuda.fusion"),
        ("none", "exact", 44.5, "inductor"),
        ("quick", "exact", 43.5, "inductor"),
    ],
)
def test_in_a_first_answer_slow_compilers_build_only_what_they_make_clearly_faster(
    effort: str, solver: str, other_us: float, winner: str
) -> None:
    net, found = gated_net({"inductor": 40.0, "cuda.fusion": other_us}, 50.0)
    choice = select(net, found, Settings(effort=effort, solver=solver))
    (chosen,) = choice.selection.chosen
    assert chosen.config.engine == winner
    assert choice.selection.total_us == chosen.median_us == (40.0 if winner == "inductor" else other_us)
    assert choice.selection.bound_us == pytest.approx(40.0)


def test_what_is_left_out_as_equally_fast_is_not_left_out_for_lack_of_time() -> None:
    net, found = gated_net({"inductor": 4.0, "cuda.fusion": 4.07})
    net = replace(net, target=replace(TARGET, device="cpu"))
    choice = select(net, found, Settings(), Deadline(60.0, iter([0.0, *[60.0] * 100]).__next__))
    assert [candidate.config.engine for candidate in choice.selection.chosen] == ["cuda.fusion"]
    assert not any(note.endswith(LACK_OF_TIME) for note in choice.notes)


def test_a_first_answer_compares_its_choice_with_others_only_when_it_is_asked() -> None:
    net, found = gated_net({"inductor": 4.0, "cuda.fusion": 3.0, "triton.pooling": 3.5})
    settings = Settings(effort="none")
    first, whole = select(net, found, settings), select(net, found, Settings())
    assert dict(first.strategies) == {"baseline": 10.0, "exact": 3.0}
    asked = compared(first, net, settings)
    assert asked.strategies == whole.strategies
    assert whole.strategies["single:triton.pooling"] == 3.5
    assert (asked.predicted, asked.notes, asked.left_out) == (whole.predicted, whole.notes, ())


class Unpooled(nn.Module):
    """Overlapping places are written in any order, on CPUs too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, places = nn.functional.max_pool2d(x, 2, return_indices=True)
        return torch.relu(nn.functional.max_unpool2d(y, places, 2))


@pytest.mark.parametrize("effort", [Effort.QUICK, Effort.NONE])
def test_a_net_that_pytorch_cannot_compute_with_the_same_bits_is_refused(effort: Effort, tmp_path: Path) -> None:
    settings = Settings(effort=effort, deterministic=True, db=tmp_path / "rows.db", isolate=False)
    with pytest.raises(SelectionError, match=r"aten\.max_unpool2d\.default"):
        convoy.optimize(Unpooled().eval(), (torch.randn(1, 3, 8, 8),), settings=settings)


class Placed(nn.Module):
    """Puts values in places that an index names, on CPUs in any order too; ATen has a steady way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.index_copy(x, 1, torch.tensor([0, 2]), x[:, :2]))


@pytest.mark.parametrize("model", [Placed(), nn.Conv2d(3, 4, 3)])
def test_a_steady_net_that_is_not_faster_is_kept_where_pytorchs_own_may_differ(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_to_end, "is_faster", lambda result, baseline: False)
    settings = Settings(
        effort=Effort.NONE, deterministic=True, only_engines=("aten",), db=tmp_path / "rows.db", isolate=False
    )
    x = torch.randn(1, 3, 8, 8)
    fast = convoy.optimize(model.eval(), (x,), settings=settings)
    differs = isinstance(model, Placed)
    assert fast.plan.baseline == (not differs)
    ending = "but kept: `deterministic` was asked for" if differs else "so the plan is the baseline"
    assert f"not faster in four of five rounds, {ending}" in fast.plan.notes[-1]
    assert ("aten.index_copy.default may give different bits" in fast.plan.notes[-1]) == differs
    assert torch.equal(fast(x), model(x))
