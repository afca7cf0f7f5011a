"""Learning criteria: a law that was planted must be found again, and what teaches nothing must not be learned from."""

import math
from dataclasses import replace

import pytest

from convoy.compare.study.learn_criteria import CriteriaCheck, check, known_layers, learn, round_between, sizes_of
from convoy.errors import InputError
from convoy.perfdb import Measurement, Status
from convoy.problem import ConvProblem, EngineConfig, Epilogue, Knobs, LinearProblem
from convoy.target import Target
from convoy.tune.criteria import TreeLeaf, TreeSplit, leaves

TARGET = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20, (("torch", "2.11"),))


def conv(c=64, k=64, side=14, r=3, layout="nhwc"):
    return ConvProblem(1, c, side, side, k, r, r, r // 2, r // 2, layout=layout)


def row(problem, engine, time_us, *, samples=9, status=Status.OK, knobs=None, protocol="v", version=1):
    config = EngineConfig(engine, version, knobs or Knobs())
    return Measurement(problem.key, config, TARGET.digest, protocol, status, samples=samples, median_us=time_us)


def law(problem):
    """`winograd` wins on large 3x3 filters, `gemm` on 1x1, `aten` where there are few filters."""
    times = {"aten": 10.0, "gemm": 30.0, "winograd": 40.0}
    if problem.k > 32:
        times["gemm" if problem.r == 1 else "winograd"] = 2.0
    return times


SWEPT = [conv(c, k, side, r) for c in (16, 64, 256) for k in (8, 32, 64, 256) for side in (7, 14) for r in (1, 3)]
ROWS = [row(p, engine, t) for p in SWEPT for engine, t in law(p).items()]


def test_a_planted_law_is_found_and_holds_on_layers_that_were_not_swept() -> None:
    criteria = learn(ROWS, TARGET, protocol="v")
    assert {leaf.problems for leaf in leaves(criteria.root)} == {12, 24}
    assert criteria.problems == len(SWEPT)
    unseen = [conv(c, k, side, r) for c in (48, 100) for k in (24, 96, 200) for side in (9, 28) for r in (1, 3)]
    times = [row(p, engine, t) for p in unseen for engine, t in law(p).items()]
    assert check(criteria, known_layers(times), "aten") == CriteriaCheck(len(unseen), 1.0, 1.0, 1.0)


def test_a_wrong_law_shows_in_the_check() -> None:
    criteria = learn(ROWS, TARGET, protocol="v")
    swapped = {"gemm": "winograd", "winograd": "gemm", "aten": "aten"}
    times = [row(p, swapped[engine], t) for p in SWEPT for engine, t in law(p).items()]
    found = check(criteria, known_layers(times), "aten")
    assert found.within_5 == pytest.approx(0.5)
    assert found.mean < 0.5


def test_equally_fast_engines_are_no_reason_to_split() -> None:
    rows = [row(p, e, 10.0 + 0.1 * ((p.c + p.k + i) % 2)) for p in SWEPT for i, e in enumerate(("aten", "gemm"))]
    assert isinstance(learn(rows, TARGET, protocol="v").root, TreeLeaf)


def test_only_good_rows_of_the_protocol_teach() -> None:
    problem = conv()
    rows = [
        row(problem, "aten", 5.0),
        row(problem, "aten", 4.0, knobs=Knobs.of(k=1)),
        row(problem, "gemm", 1.0, samples=1),
        row(problem, "fft", 0.0, status=Status.WRONG_RESULT, samples=0),
        row(conv(k=65), "aten", 1.0),
    ]
    assert [layer.best_us for layer in known_layers(rows)] == [{"aten": 4.0}, {"aten": 1.0}]
    with pytest.raises(InputError, match="at least two engines"):
        learn(rows, TARGET, protocol="v")
    with pytest.raises(InputError, match="at least two engines"):
        learn(ROWS, TARGET, protocol="another")


def test_versions_are_the_newest() -> None:
    rows = [*ROWS, row(conv(), "gemm", 1.0, version=7, protocol="another"), row(conv(), "gemm", 1.0, version=4)]
    assert learn(rows, TARGET, protocol="v").engines == {"aten": 1, "gemm": 4, "winograd": 1}


def test_the_same_rows_give_the_same_tree() -> None:
    first, second = (learn(rows, TARGET, protocol="v") for rows in (ROWS, ROWS[::-1]))
    assert first.root == second.root
    assert isinstance(first.root, TreeSplit)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(32, 64, 50), (1, 2, 1), (0, 1, 0.5), (9.99, 10.01, 10), (3.14159, 3.1416, 3.14159), (7e6, 9e7, 3e7)],
)
def test_thresholds_are_what_a_person_would_write(low, high, expected) -> None:
    number = round_between(low, high)
    assert number == pytest.approx(expected, rel=1e-4)
    assert low <= number < high


def test_shares_within_a_limit() -> None:
    found = CriteriaCheck.of([1.0, 1 / 1.049, 1 / 1.051, 1 / 1.099, 1 / 1.2])
    assert (found.within_5, found.within_10) == (pytest.approx(0.4), pytest.approx(0.8))
    assert found.mean == pytest.approx((1.049 * 1.051 * 1.099 * 1.2) ** -0.2)
    assert CriteriaCheck.of([]) == CriteriaCheck(0, 0.0, 0.0, 0.0)


def test_a_layer_left_out_takes_its_twins_along() -> None:
    problem = conv()
    twins = [problem.with_layout("nchw"), replace(problem, n=8, epilogue=Epilogue(bias=True), x_dtype="fp16")]
    assert {sizes_of(p) for p in twins} == {sizes_of(problem)}
    assert sizes_of(conv(k=65)) != sizes_of(problem)
    assert (
        sizes_of(LinearProblem(1, 4, 5)) == sizes_of(LinearProblem(8, 4, 5, "fp16")) != sizes_of(LinearProblem(1, 5, 4))
    )


def test_the_baseline_stands_in_where_nothing_is_known() -> None:
    criteria = learn(ROWS, TARGET, protocol="v")
    layer = known_layers([row(conv(layout="nchw"), "aten", 2.0), row(conv(layout="nchw"), "gemm", 1.0)])
    assert check(criteria, layer, "aten").mean == pytest.approx(0.5)
    assert math.isclose(check(criteria, layer, "gemm").mean, 1.0)
