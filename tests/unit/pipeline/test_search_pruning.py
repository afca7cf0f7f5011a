"""The pruned search: problems that need the baseline alone, floors of predictions, and shares of the work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.graph.text import parse_graph
from convoy.perfdb.row import Measurement, Status
from convoy.pipeline.search_pruning import nchw_duplicates, prefer_measured, share_of_problems, subsumed_problems
from convoy.problem import EngineConfig, Knobs, LayoutProblem, Problem, TensorSpec
from convoy.regions import Region, propose
from convoy.target import Target
from convoy.tune import SearchResult

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20, (("cudnn_tf32", "on"),))

HEAD = """graph 1
input %x: fp32[2,4,8,8]
constant %w: fp32[4,4,3,3]
"""
CONV = "fp32[2,4,8,8] = conv2d(%{}, %w, None, (1, 1), (1, 1), (1, 1), 1)\n"


def regions(text: str) -> dict[str, Region]:
    found = propose(parse_graph(HEAD + text), layouts=("nchw", "nhwc"), numerics="strict")
    return {region.id: region for region in found}


def named(found: dict[str, Region], keys: set[str]) -> set[str]:
    """Ids of the regions all of whose problems are among these, and that have one."""
    return {name for name, region in found.items() if {p.key for p in region.problems} <= keys}


def test_a_convolution_leaves_its_activation_to_the_region_that_has_both() -> None:
    found = regions("%c: " + CONV.format("x") + "%a: fp32[2,4,8,8] = aten.relu.default(%c)\nreturn %a\n")
    assert set(found) == {"conv(c)", "conv(c+a)", "op(a)"}
    assert named(found, subsumed_problems(list(found.values()))) == {"conv(c)"}


def test_what_was_measured_outdoes_what_is_predicted_in_another_format() -> None:
    """Else the best of many predictions is chosen, which is one that is too good."""
    alone, whole = (
        regions("%c: " + CONV.format("x") + "%a: fp32[2,4,8,8] = aten.relu.default(%c)\nreturn %a\n")[name]
        for name in ("conv(c)", "conv(c+a)")
    )

    def rows(problem: Problem, samples: int) -> list[Measurement]:
        return [
            Measurement(problem.key, EngineConfig(engine, 1, Knobs()), "0" * 16, "p-1", Status.OK, samples, us, 0.1)
            for engine, us in (("aten", 9.0), ("gemm", 3.0))
        ]

    measured, predicted = sorted(whole.problems, key=lambda problem: problem.layout == "nchw")
    found = SearchResult({p.key: rows(p, 5 if p is measured else 0) for p in (*whole.problems, *alone.problems)})
    found = prefer_measured([alone, whole], found)
    engines = {key: [row.config.engine for row in kept] for key, kept in found.rows.items()}
    assert engines[measured.key] == ["aten", "gemm"]
    assert engines[predicted.key] == ["aten"]
    assert all(engines[problem.key] == ["aten", "gemm"] for problem in alone.problems)  # nothing of it was measured


def test_pytorchs_own_time_alone_outdoes_nothing() -> None:
    """In nchw it is often all that is looked at: what is predicted in nhwc stays."""
    whole = regions("%c: " + CONV.format("x") + "%a: fp32[2,4,8,8] = aten.relu.default(%c)\nreturn %a\n")["conv(c+a)"]

    def row(problem: Problem, engine: str, samples: int) -> Measurement:
        return Measurement(problem.key, EngineConfig(engine, 1, Knobs()), "0" * 16, "p-1", Status.OK, samples, 9.0, 0.1)

    nhwc, nchw = sorted(whole.problems, key=lambda problem: problem.layout == "nchw")
    found = SearchResult({nchw.key: [row(nchw, "aten", 5)], nhwc.key: [row(nhwc, "aten", 5), row(nhwc, "gemm", 0)]})
    found = prefer_measured([whole], found)
    assert [one.config.engine for one in found.rows[nhwc.key]] == ["aten", "gemm"]


def test_a_convolution_alone_is_measured() -> None:
    found = regions("%c: " + CONV.format("x") + "return %c\n")
    assert subsumed_problems(list(found.values())) == set()


def test_a_problem_that_is_somewhere_the_whole_chain_is_measured() -> None:
    found = regions(
        "%c: " + CONV.format("x") + "%a: fp32[2,4,8,8] = aten.relu.default(%c)\n%d: " + CONV.format("a") + "return %d\n"
    )
    assert found["conv(c)"].problems == found["conv(d)"].problems
    assert subsumed_problems(list(found.values())) == set()


def test_with_and_without_a_residual_both_stay() -> None:
    found = regions(
        "%c: "
        + CONV.format("x")
        + "%s: fp32[2,4,8,8] = aten.add.Tensor(%c, %x)\n%a: fp32[2,4,8,8] = aten.relu.default(%s)\nreturn %a\n"
    )
    assert {"conv(c)", "conv(c+s)", "conv(c+s+a)"} <= set(found)
    assert named(found, subsumed_problems(list(found.values()))) == {"conv(c+s)"}


def test_linear_layers_too_and_operations_never() -> None:
    text = (
        "constant %v: fp32[3,256]\n%f: fp32[2,256] = aten.view.default(%x, (2, 256))\n"
        "%l: fp32[2,3] = linear(%f, %v, None)\n%a: fp32[2,3] = aten.relu.default(%l)\nreturn %a\n"
    )
    found = regions(text)
    assert named(found, subsumed_problems(list(found.values()))) == {"linear(l)"}


def halves(text: str, layouts: tuple[str, ...] = ("nchw", "nhwc"), numerics: str = "as_torch") -> list[Region]:
    return propose(parse_graph((HEAD + text).replace("fp32", "fp16")), layouts=layouts, numerics=numerics)


def test_convolutions_on_tensor_cores_are_measured_in_nhwc() -> None:
    found = nchw_duplicates(halves("%c: " + CONV.format("x") + "return %c\n"), H100)
    assert len(found) == 1
    assert ":nchw:" in found.pop()


TANH = "%r: fp32[2,4,8,8] = aten.tanh.default(%{})\n"


def test_pieces_between_them_are_measured_in_nchw_for_comparison_alone() -> None:
    net = halves("%c: " + CONV.format("x") + TANH.format("c") + "%d: " + CONV.format("r") + "return %d\n")
    found = nchw_duplicates(net, H100)
    assert sum(key.startswith("subgraph:nchw") for key in found) == 1
    assert not any(":nhwc" in key for key in found)


def test_where_one_convolution_is_not_on_tensor_cores_pieces_compete_in_nchw() -> None:
    exact = list(regions("%c: " + CONV.format("x") + "return %c\n").values())
    net = halves("%c: " + CONV.format("x") + TANH.format("c") + "return %r\n")
    assert any(key.startswith("subgraph:nchw") for key in nchw_duplicates(net, H100))
    assert not any(key.startswith("subgraph:nchw") for key in nchw_duplicates([*net, *exact], H100))


@pytest.mark.parametrize(
    ("regions", "target"),
    [
        (halves("%c: " + CONV.format("x") + "return %c\n", ("nchw",)), H100),
        (halves("%a: fp32[2,4,8,8] = aten.relu.default(%x)\nreturn %a\n"), H100),
        (list(regions("%c: " + CONV.format("x") + "return %c\n").values()), H100),
        (
            propose(
                parse_graph(HEAD + "%c: " + CONV.format("x") + "return %c\n"),
                layouts=("nchw", "nhwc"),
                numerics="as_torch",
            ),
            replace(H100, versions=(("cudnn_tf32", "off"),)),
        ),
    ],
    ids=["nchw alone is allowed", "no convolution", "strict fp32", "TF32 is off"],
)
def test_other_regions_are_measured_in_nchw_too(regions: list[Region], target: Target) -> None:
    assert nchw_duplicates(regions, target) == set()


def test_shares_hold_every_problem_once_and_are_alike_in_every_process():
    problems = [LayoutProblem(TensorSpec((1, c, 4, 4), "fp32"), "nchw", "nhwc") for c in range(1, 24)]
    for count in (1, 2, 5):
        shares = [share_of_problems(problems, index, count) for index in range(count)]
        assert sorted(p.key for share in shares for p in share) == sorted(p.key for p in problems)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert shares == [share_of_problems(list(problems), index, count) for index in range(count)]
    assert share_of_problems(problems, 0, 1) == problems
