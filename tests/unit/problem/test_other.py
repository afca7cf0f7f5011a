"""LinearProblem, SubgraphProblem, LayoutProblem, TensorSpec and Knobs: text forms and refusals."""

from __future__ import annotations

import pytest

from convoy.errors import InputError
from convoy.problem import (
    EngineConfig,
    Epilogue,
    Knobs,
    LayoutProblem,
    LinearProblem,
    SubgraphProblem,
    TensorSpec,
    parse_problem,
)


def test_linear_round_trip_and_counts() -> None:
    problem = LinearProblem(3, 5, 7, "fp16", "strict", Epilogue(bias=True, activation="relu"))
    assert parse_problem(problem.key) == problem
    assert problem.flops == 2 * 3 * 5 * 7
    assert problem.bytes_min == 2 * (3 * 5 + 5 * 7 + 3 * 7 + 7)


def test_layout_round_trip() -> None:
    problem = LayoutProblem(TensorSpec((1, 2, 3, 4), "fp16"), "nchw", "nhwc")
    assert parse_problem(problem.key) == problem
    assert problem.bytes_min == 2 * 24 * 2
    with pytest.raises(InputError, match="4-D"):
        LayoutProblem(TensorSpec((1, 2), "fp32"), "nchw", "nhwc")


def test_subgraph_key_depends_on_text_and_layout_alone() -> None:
    problem = SubgraphProblem("a", "nchw", 8, "relu")
    assert problem == SubgraphProblem("a", "nchw", 16, "other")
    assert problem.key == SubgraphProblem("a", "nchw").key
    assert len({problem.key, SubgraphProblem("b").key, problem.with_layout("nhwc").key}) == 3
    assert parse_problem(problem.key, "a") == problem
    with pytest.raises(InputError):
        parse_problem(problem.key, "another text")
    with pytest.raises(InputError):
        parse_problem(problem.key)


@pytest.mark.parametrize("text", ["fp32[1,2", "fp32", "fp9[1]", "fp32[-1]", "fp32[a]", "fp32[1,]"])
def test_bad_specs(text: str) -> None:
    with pytest.raises(InputError):
        TensorSpec.parse(text)


def test_spec_round_trip() -> None:
    for spec in (TensorSpec((), "i64"), TensorSpec((0,), "bool"), TensorSpec((1, 3, 5), "bf16")):
        assert TensorSpec.parse(str(spec)) == spec
    assert TensorSpec((2, 3), "fp64").size_bytes == 48


def test_knobs_are_sorted_hashable_and_round_trip() -> None:
    knobs = Knobs.of(b=2, a=True, c="word", d=-3)
    assert list(knobs) == ["a", "b", "c", "d"]
    assert Knobs.parse(str(knobs)) == knobs
    assert hash(knobs) == hash(Knobs.of(d=-3, c="word", a=True, b=2))
    assert knobs.integer("b") == 2
    with pytest.raises(InputError):
        knobs.integer("a")
    assert str(EngineConfig("aten", 2, knobs)) == "aten@2[a=true,b=2,c=word,d=-3]"


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=1;b", "a b=1", "a=$(x)", "a=1,,b"])
def test_bad_knobs(text: str) -> None:
    if text == "a=1,,b":
        text = "a=1,,b="
    with pytest.raises(InputError):
        Knobs.parse(text)


@pytest.mark.parametrize("value", ["12", "true", "", "a,b", "a=b"])
def test_text_knobs_that_would_read_back_as_something_else_are_refused(value: str) -> None:
    with pytest.raises(InputError):
        Knobs.of(name=value)
