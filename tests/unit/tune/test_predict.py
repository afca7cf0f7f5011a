"""Prediction: laws that it must find again, and what it must not learn from."""

import math
from dataclasses import replace

import pytest

from convoy.perfdb.row import Measurement, Status
from convoy.perfdb.time_columns import TimeColumns
from convoy.problem import ConvProblem, EngineConfig, Epilogue, Knobs, LayoutProblem, Pool, SubgraphProblem, TensorSpec
from convoy.problem.layer_coordinates import coordinates_of, kind_of
from convoy.tune.fitted_roofline import LAUNCH_US, PASS_FACTOR
from convoy.tune.predict import UNMEASURED_FACTOR, TimePredictor
from convoy.tune.predicted_rows import predicted_rows
from convoy.tune.prior_rows import cost_models
from convoy.tune.problem_distance import distance
from tests.unit.engines import squeeze_excitation_cases

ATEN, ONE, TWO = (EngineConfig(name, 1, Knobs()) for name in ("aten", "one", "two"))
SPACE = {"aten": [ATEN], "one": [ONE], "two": [TWO]}
PASS = "graph 1\ninput %v0: fp32[1,64,8,8]\n" + "".join(
    f"%v{i}: fp32[1,64,8,8] = aten.relu.default(%v{i - 1})\n" for i in (1, 2, 3)
)


def conv(c=64, k=64, side=14, r=3, **rest):
    return ConvProblem(1, c, side, side, k, r, r, r // 2, r // 2, layout="nhwc", **rest)


def row(problem, config, time_us, samples=9, status=Status.OK, **rest):
    return Measurement(problem.key, config, "0" * 16, "v", status, samples=samples, median_us=time_us, **rest)


def law(problem, config):
    """`one` is the faster with few filters, `two` with many; `aten` twice as slow as the better."""
    work = problem.flops / 1e6 + 2.0
    tilt = 2.0 ** ((math.log2(problem.k) - 7) / 4)
    times = {ONE: work * tilt, TWO: work / tilt}
    return times.get(config) or 2 * min(times.values())


def experience(problems, **rest):
    rows = [row(p, config, law(p, config), **rest) for p in problems for config in (ATEN, ONE, TWO)]
    return TimePredictor.from_rows(rows, fusing=("inductor",))


KNOWN = [conv(c=c, k=k, side=side) for c in (32, 128, 512) for k in (32, 64, 256, 512) for side in (7, 14, 28)]


@pytest.mark.parametrize("k", [48, 96, 192, 384])
def test_the_winner_follows_the_nearest_sizes(k):
    problem = conv(c=256, k=k)
    times = experience(KNOWN).predict(problem, SPACE)
    assert set(times) == {ATEN, ONE, TWO}
    assert min(times, key=times.__getitem__) == (ONE if k < 128 else TWO)
    for config, time_us in times.items():
        assert time_us == pytest.approx(law(problem, config), rel=0.5)


def test_a_problem_that_was_measured_is_its_own_best_neighbour():
    problem = KNOWN[5]
    times = experience(KNOWN).predict(problem, SPACE)
    for config, time_us in times.items():
        assert time_us == pytest.approx(law(problem, config), rel=0.1)


def test_without_leaves_out_the_problem_in_every_layout_and_epilogue():
    problem = conv(c=64, k=64)
    twins = [problem.with_layout("nchw"), conv(c=64, k=64, epilogue=Epilogue(bias=True, activation="relu"))]
    known = experience([problem, *twins, other := conv(c=64, k=65)])
    assert ONE in known.predict(problem, SPACE)
    rows = TimeColumns.of(row(other, config, law(other, config)) for config in (ATEN, ONE, TWO))
    assert known.without(problem).predict(problem, SPACE) == TimePredictor(rows, roofline=known.roofline).predict(
        problem, SPACE
    )
    assert known.without(problem).predict(problem, SPACE) != known.predict(problem, SPACE)
    assert known.without(other).predict(problem, SPACE)[ONE] == pytest.approx(law(problem, ONE))


def test_cost_models_carry_what_neighbours_cannot_know():
    def waves(problem, config):
        """Time in steps, as tiles that fill a device have it: sizes say nothing of where the next step is."""
        return 10.0 * math.ceil(problem.k / 100) if config == TWO else None

    sizes = [40, 90, 110, 190, 290]
    rows = [row(conv(k=k), TWO, 1.5 * waves(conv(k=k), TWO)) for k in sizes] + [
        row(conv(k=k), ATEN, 80.0) for k in sizes
    ]
    problem = conv(k=205)
    modelled = TimePredictor.from_rows(rows, waves).predict(problem, SPACE)[TWO]
    plain = TimePredictor.from_rows(rows).predict(problem, SPACE)[TWO]
    assert modelled == pytest.approx(45.0, rel=0.1)
    assert abs(plain - 45.0) > abs(modelled - 45.0)
    other = TimePredictor.from_rows(
        rows, lambda p, c: waves(p, c) if p.k in sizes else None
    )  # no word on this one: as without
    assert other.predict(problem, SPACE)[TWO] == pytest.approx(plain)
    assert TimePredictor.from_rows(rows, waves).without(problem).predict(problem, SPACE)[TWO] == modelled


def test_a_cost_model_of_another_version_or_one_that_raises_says_nothing():
    class Broken:
        id, version = "one", 1

        def estimate_us(self, problem, knobs, target):
            raise ValueError(problem)

    class Good(Broken):
        id = "two"

        def estimate_us(self, problem, knobs, target):
            return 7.0

    models = cost_models([Broken(), Good()], None)
    assert models(conv(), ONE) is None
    assert models(conv(), TWO) == 7.0
    assert models(conv(), EngineConfig("two", 2, Knobs())) is None
    assert models(conv(), ATEN) is None


def test_failures_single_runs_and_unreadable_problems_teach_nothing():
    problem = conv()
    rows = [row(problem, ONE, 0.0, samples=0, status=Status.WRONG_RESULT), row(problem, TWO, 1.0, samples=1)]
    rows += [Measurement("subgraph:nhwc:" + "0" * 24, ATEN, "0" * 16, "v", Status.OK, samples=9, median_us=3.0)]
    known = TimePredictor.from_rows(rows)
    assert known.measurements == 0
    assert set(known.predict(problem, SPACE)) == {ATEN}


def test_nothing_known_gives_the_baseline_alone():
    for problem in (
        conv(),
        SubgraphProblem(PASS, "nhwc", 1 << 14),
        LayoutProblem(TensorSpec((1, 64, 8, 8), "fp32"), "nchw", "nhwc"),
    ):
        assert set(TimePredictor.from_rows([]).predict(problem, SPACE)) == {ATEN}


def test_far_neighbours_and_other_kinds_say_nothing():
    known = experience([conv(c=4, k=4, side=4)])
    assert set(known.predict(conv(c=512, k=512, side=112), SPACE)) == {ATEN}
    assert set(known.predict(conv(c=4, k=4, side=4, groups=4), SPACE)) == {ATEN}


def test_another_filter_and_arithmetic_are_farther():
    here = coordinates_of(conv(c=64))
    assert distance(here, here) == 0
    same_reduction = conv(c=576, r=1)
    assert distance(here, coordinates_of(conv(c=64, stride_h=2, stride_w=2, side=28))) > 0
    assert distance(here, coordinates_of(conv(c=64, numerics="strict"))) > 0
    finished = replace(conv(c=64), epilogue=Epilogue(bias=True, activation="relu"))
    pooled = replace(finished, epilogue=replace(finished.epilogue, pool=Pool("max", 2, 2, 2, 2)))
    assert 0 < distance(here, coordinates_of(finished)) < distance(here, coordinates_of(pooled))
    assert kind_of(same_reduction) != kind_of(conv())


def test_pieces_cost_a_pass_an_operator_where_nothing_fuses_them():
    piece = SubgraphProblem(PASS, "nhwc", 1 << 20)
    space = {"aten": [ATEN], "inductor": [EngineConfig("inductor", 1, Knobs())]}
    times = {config.engine: time_us for config, time_us in experience(KNOWN).predict(piece, space).items()}
    assert times["aten"] == pytest.approx(3 * times["inductor"])


def test_aten_needs_more_than_a_pass_for_the_layers_of_a_piece():
    gate = squeeze_excitation_cases.block("mobilenet")
    known, own = experience(KNOWN), EngineConfig("inductor", 1, Knobs())
    times = known.predict(gate, {"aten": [ATEN], "inductor": [own]})
    assert times[ATEN] == pytest.approx((6 + 2 * 3) * times[own])


def test_a_lone_operator_that_the_compiler_may_do_better_is_not_left_to_aten():
    text = "graph 1\ninput %x: fp16[8,64,56,56]\n%y: fp16[8,64,1,1] = aten.mean.dim(%x, [2, 3], True)\nreturn %y\n"
    piece = SubgraphProblem(text, "nhwc", 1 << 20)
    compiled = EngineConfig("inductor", 1, Knobs())
    alone = experience(KNOWN).predict(piece, {"aten": [ATEN]})
    both = experience(KNOWN).predict(piece, {"aten": [ATEN], "inductor": [compiled]})
    assert both[ATEN] == pytest.approx(2 * both[compiled])
    assert alone[ATEN] == pytest.approx(both[compiled])


def test_a_cost_model_of_subgraphs_counts_with_a_margin():
    piece = SubgraphProblem(PASS, "nhwc", 1 << 20)
    own, other = EngineConfig("own", 1, Knobs()), EngineConfig("other", 1, Knobs())
    space = {"aten": [ATEN], "own": [own], "other": [other]}
    known = TimePredictor.from_rows([row(conv(), ATEN, 9.0)], lambda *_: 1.5, estimating=("own",))
    times = known.predict(piece, space)
    assert times[own] == pytest.approx(1.3 * 1.5)
    assert times[other] == times[ATEN] > 1.5
    nothing_known = TimePredictor.from_rows([], lambda *_: 1.5, estimating=("own",))
    assert nothing_known.predict_with(piece, space).keys() == {ATEN}


def test_of_two_compilers_that_fuse_the_one_without_a_wait_is_chosen():
    piece = SubgraphProblem(PASS, "nhwc", 1 << 20)
    slow, own = EngineConfig("inductor", 1, Knobs()), EngineConfig("own", 1, Knobs())
    space = {"aten": [ATEN], "inductor": [slow], "own": [own]}
    rows, fusing = [row(conv(), ATEN, 9.0)], ("inductor", "own")
    times = TimePredictor.from_rows(rows, fusing=fusing, threaded=("own",)).predict(piece, space)
    assert times[own] < times[slow] < 1.1 * times[own] < times[ATEN]
    alone = TimePredictor.from_rows(rows, fusing=fusing, threaded=("own",)).predict(piece, {"inductor": [slow]})
    assert alone[slow] == pytest.approx(times[own])


def test_predicted_rows_have_no_samples_and_keep_what_is_not_deterministic():
    rows = [row(conv(), ATEN, 9.0), row(conv(), ONE, 5.0, deterministic=False)]
    found = {r.config: r for r in predicted_rows(TimePredictor.from_rows(rows), conv(c=65), SPACE, "1" * 16, "v")}
    assert {r.samples for r in found.values()} == {0}
    assert found[ATEN].deterministic
    assert not found[ONE].deterministic
    assert "predicted from 2 measurements" in found[ONE].reason


def test_a_gradient_that_is_not_deterministic_says_nothing_of_forward_passes():
    dgrad = conv(direction="dgrad")
    known = TimePredictor.from_rows([row(conv(), ATEN, 9.0), row(dgrad, ATEN, 9.0, deterministic=False)])
    found = {
        problem: {r.config: r for r in predicted_rows(known, problem, {"aten": [ATEN]}, "t", "p")}[ATEN].deterministic
        for problem in (conv(side=28), conv(side=28, direction="dgrad"))
    }
    assert list(found.values()) == [True, False]


def models(config):
    return {"two": 1.0}.get(config.engine)


def test_an_engine_that_was_never_measured_is_taken_at_its_cost_models_word():
    known = experience(KNOWN)
    without = TimePredictor.from_rows(row(p, c, law(p, c)) for p in KNOWN for c in (ATEN, ONE))
    problem = conv(c=256, k=48)
    assert known.predict_with(problem, SPACE, estimate=models) == known.predict(problem, SPACE)
    times = without.predict_with(problem, SPACE, estimate=models)
    assert times[TWO] == pytest.approx(UNMEASURED_FACTOR)
    assert {c: t for c, t in times.items() if c != TWO} == without.predict(problem, SPACE)
    assert TimePredictor.from_rows([]).predict_with(problem, SPACE, estimate=models).keys() == {ATEN}


def test_criteria_move_a_choice_that_neighbours_leave_open():
    known = experience(KNOWN)
    problem = conv(c=256, k=96)
    times = known.predict(problem, SPACE)
    assert min(times, key=times.__getitem__) == ONE
    other = known.predict_with(problem, SPACE, regrets={"one": 1.0, "two": 0.0})
    assert min(other, key=other.__getitem__) == TWO
    assert other[ATEN] == times[ATEN]  # they say nothing of it
    expected = {ONE: 0.5 * 1.0, TWO: 0.5 * math.log(times[TWO] / times[ONE])}
    for config, behind in expected.items():
        assert other[config] == pytest.approx(times[ONE] * math.exp(behind))


def test_criteria_cannot_make_up_for_a_clear_measurement():
    slow = [row(p, c, law(p, c) * (40 if c == TWO else 1)) for p in KNOWN for c in (ATEN, ONE, TWO)]
    times = TimePredictor.from_rows(slow).predict_with(
        conv(c=256, k=96), SPACE, regrets={"one": 1.0, "two": 0.0, "aten": 1.0}
    )
    assert min(times, key=times.__getitem__) != TWO


def test_on_a_device_without_rows_criteria_and_cost_models_decide():
    regrets = {"aten": 0.7, "two": 0.0, "one": 0.1}
    times = TimePredictor.from_rows([]).predict_with(conv(), SPACE, regrets=regrets, estimate=models)
    assert times[TWO] == pytest.approx(UNMEASURED_FACTOR)
    assert times[ATEN] == pytest.approx(UNMEASURED_FACTOR * math.exp(0.7))
    assert ONE not in times  # without a cost model there is nothing to base a time on
    assert set(TimePredictor.from_rows([]).predict_with(conv(), SPACE, regrets=regrets)) == {ATEN}


def test_times_on_pruned_weights_say_nothing_of_others():
    plain = ConvProblem(1, 64, 28, 28, 64, 3, 3, 1, 1)
    pruned = ConvProblem(1, 64, 28, 28, 64, 3, 3, 1, 1, weight_mask="0123456789abcdef")
    rows = [
        Measurement(problem.key, EngineConfig(engine), "0" * 16, "p", Status.OK, samples=9, median_us=time)
        for problem, engine, time in ((plain, "aten", 100.0), (pruned, "pruned.c", 5.0))
    ]
    assert TimePredictor.from_rows(rows).measurements == 1
    both, alone = (TimePredictor.from_rows(some) for some in (rows, rows[:1]))
    assert both.roofline == alone.roofline
    assert both.predict(plain, {"aten": [ATEN]}) == alone.predict(plain, {"aten": [ATEN]})


FLOOR = 1e6
"""Microseconds, more than any prediction here."""


def test_nothing_is_predicted_below_its_floor_and_the_order_stays():
    known = experience(KNOWN)
    problem = conv(c=256, k=48)
    free = known.predict_with(problem, SPACE)
    low, middle, high = sorted(free.values())
    for floor in (FLOOR, middle, (low + middle) / 2):
        times = known.predict_with(problem, SPACE, floor_us=floor)
        assert min(times.values()) >= floor
        assert sorted(times, key=times.__getitem__) == sorted(free, key=free.__getitem__)
        assert len(set(times.values())) == 3
    assert known.predict_with(problem, SPACE, floor_us=low / 2) == free
    assert known.predict_with(problem, SPACE, floor_us=middle)[max(free, key=free.__getitem__)] == high


def test_criteria_and_cost_models_promise_nothing_below_the_floor():
    regrets = {"aten": 0.7, "two": 0.0, "one": 0.1}
    for known in (TimePredictor.from_rows([]), experience(KNOWN)):
        times = known.predict_with(conv(), SPACE, regrets=regrets, estimate=models, floor_us=FLOOR)
        assert TWO in times
        assert min(times.values()) >= FLOOR


def test_a_pass_over_memory_is_predicted_with_a_launch_and_what_kernels_reach_of_the_memorys_rate():
    known = experience(KNOWN)
    problem = SubgraphProblem(PASS, "nhwc", 1 << 14)
    least = known.roofline.launch_us + PASS_FACTOR * 732.0
    assert min(known.predict_with(problem, SPACE, floor_us=732.0).values()) >= least
    assert min(known.predict_with(conv(), SPACE, floor_us=732.0).values()) < least
    free = known.predict_with(problem, SPACE)
    assert min(free.values()) < 732.0


def test_atens_layers_in_a_subgraph_take_longer_than_their_floor():
    """The subgraph's bytes say little: at 732 us for its operations ATen does not reach the time of a pass over memory."""
    text = (
        "graph 1\ninput %x: fp32[1,8,14,14]\nconst %w: fp32[8,8,3,3]\n%y: fp32[1,8,14,14] = conv2d(%x, %w)\nreturn %y\n"
    )
    piece, own = SubgraphProblem(text, "nhwc", 1 << 14), EngineConfig("own", 1, Knobs())
    known = TimePredictor.from_rows([row(conv(), ATEN, 9.0)], lambda *_: 900.0, estimating=("own",))
    times = known.predict_with(piece, {"aten": [ATEN], "own": [own]}, floor_us=732.0)
    assert times[ATEN] == pytest.approx(4 * 732.0)
    assert times[own] == pytest.approx(UNMEASURED_FACTOR * 900.0)


def test_where_nothing_was_ever_measured_the_floor_and_a_launch_are_all_that_is_told():
    unknown = TimePredictor.from_rows([])
    for problem in (conv(), SubgraphProblem(PASS, "nhwc", 1 << 14)):
        times = unknown.predict_with(problem, SPACE, floor_us=732.0)
        assert times == {ATEN: pytest.approx(LAUNCH_US + 732.0, rel=1e-3)}
    rows = predicted_rows(unknown, conv(), SPACE, "1" * 16, "v", floor_us=732.0)
    assert [(row.config, row.predicted) for row in rows] == [(ATEN, True)]
    assert rows[0].median_us >= 732.0
