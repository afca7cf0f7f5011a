import random
from dataclasses import replace

import pytest

from convoy.engines.base import Engine
from convoy.errors import InputError
from convoy.measurement.engine_space import neighbours, query_engine
from convoy.measurement.protocol import Protocol
from convoy.perfdb.record import read_record, to_record
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Knobs, LinearProblem
from convoy.settings import Effort
from convoy.support import Support
from convoy.target import Target
from convoy.tune.local_search import QUICK_COMPILED_CONFIGS, QUICK_CONFIGS
from convoy.tune.predict import TimePredictor
from convoy.tune.search_space import SearchSpace
from convoy.tune.tuning_task import FINALISTS, MAX_REQUEST_CONFIGS, TuningTask

TARGET = Target("cpu", "test", "generic", 1, 1 << 34, 1 << 20)
PROTOCOL = Protocol("wall", few=3, rounds=9)
PROBLEM = LinearProblem(2, 8, 4)


class Fake(Engine):
    """An engine of a name, with `count` settings of a knob `k` and perhaps a cost model; it can build nothing."""

    family = "gemm"

    def __init__(self, name, count=1, estimate=None, trusted=True, support=None):
        self.id, self.count, self.estimate, self.trusted = name, count, estimate, trusted
        self.support = Support.yes() if support is None else support

    def supports(self, problem, target):
        return self.support

    def space(self, problem, target):
        return [Knobs.of(k=k) for k in range(self.count)]

    def estimate_us(self, problem, knobs, target):
        return self.estimate(knobs["k"]) if self.estimate else None

    def build(self, problem, knobs, target):
        raise NotImplementedError


def config(engine, k=0):
    return EngineConfig(engine, 1, Knobs.of(k=k))


def row(engine, k=0, us=100.0, samples=3, status=Status.OK, **more):
    return Measurement(PROBLEM.key, config(engine, k), TARGET.digest, PROTOCOL.id, status, samples, us, **more)


def names(request):
    return [] if request is None else [(c.engine, c.knobs["k"]) for c in request.configs]


def answer(task, request, time_of):
    for c in request.configs:
        samples = request.rounds
        task.take(row(c.engine, c.knobs["k"], time_of(c.engine, c.knobs["k"]), samples))


def test_the_first_look_takes_every_default_the_baseline_first():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("a", 3), Fake("aten"), Fake("b", 2)], TARGET))
    request = task.first_look(PROTOCOL, Effort.QUICK)
    assert names(request) == [("aten", 0), ("a", 0), ("b", 0)]
    assert (request.rounds, request.best_us) == (3, 0.0)


def test_what_is_known_is_not_asked_again_failures_too():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("a"), Fake("aten"), Fake("b")], TARGET))
    task.take_known([row("aten", us=50.0), row("b", status=Status.TIMEOUT, us=0, samples=0, reason="slow")])
    request = task.first_look(PROTOCOL, Effort.QUICK)
    assert names(request) == [("a", 0)]
    assert request.best_us == 50.0
    assert not task.measured


@pytest.mark.parametrize(
    ("known", "whole"),
    [
        ([], False),
        ([row("aten")], False),  # a search that was cut short after its baselines
        ([row("aten"), row("plain", us=50.0)], False),  # and after what needs no compiler
        ([row("plain")], False),
        ([row("aten"), row("modelled", us=20.0)], True),
        ([row("aten"), row("modelled", status=Status.TIMEOUT, reason="x")], True),  # a failure is an answer
        ([row("aten", us=2.0)], True),  # what the model promises is hopeless
    ],
)
def test_a_problem_is_known_when_engines_with_a_cost_model_had_their_turn(known, whole):
    task = TuningTask(
        SearchSpace(PROBLEM, [Fake("aten"), Fake("plain"), Fake("modelled", 2, estimate=lambda k: 10.0)], TARGET)
    )
    task.take_known(known)
    assert task.is_known() is whole


def test_one_engine_that_failed_does_not_speak_for_another_that_was_not_tried():
    """All candidates that are compiled first may be refused: then the others are still to be predicted."""
    engines = [Fake("aten"), Fake("first", estimate=lambda k: 10.0), Fake("second", estimate=lambda k: 12.0)]
    task = TuningTask(SearchSpace(PROBLEM, engines, TARGET))
    task.take_known([row("aten"), row("first", status=Status.COMPILE_ERROR, reason="spills")])
    assert not task.is_known()
    task.take(row("second", us=30.0))
    assert task.is_known()


def test_where_there_is_no_cost_model_the_baseline_says_that_a_problem_is_known():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten", 1, estimate=lambda k: 5.0), Fake("plain")], TARGET))
    assert not task.is_known()
    task.take_known([row("aten")])
    assert task.is_known()


def test_without_a_row_of_the_baseline_no_cost_model_is_asked():
    """A first answer asks this of thousands of problems, and a cost model may take a millisecond."""
    asked = []
    engines = [Fake("aten"), Fake("a", estimate=lambda k: asked.append(k) or 1.0)]
    task = TuningTask(SearchSpace(PROBLEM, engines, TARGET))
    assert not task.is_known()
    task.take_known([row("a")])
    assert not task.is_known()
    assert not asked


def test_the_only_candidate_gets_all_samples_at_once():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten")], TARGET))
    request = task.first_look(PROTOCOL, Effort.QUICK)
    assert request.rounds == 9
    answer(task, request, lambda *_: 5.0)
    assert task.is_done(PROTOCOL, Effort.QUICK)
    assert task.finals(PROTOCOL, Effort.QUICK) is None


def test_rows_that_mean_nothing_any_more_are_passed_over():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("a", 2), Fake("no", support=Support.no("never"))], TARGET))
    stale = Measurement(PROBLEM.key, EngineConfig("a", 9, Knobs.of(k=0)), "t", "p", Status.OK, 9, 1.0)
    task.take_known([stale, row("a", 7), row("no"), row("gone"), row("a", 1)])
    assert set(task.rows) == {config("a", 1)}
    assert task.refusals(Effort.QUICK) == {"no": "never"}


def test_a_fused_twin_leaves_the_baseline_alone():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Fake("a")], TARGET, baseline_only=True))
    assert names(task.first_look(PROTOCOL, Effort.FULL)) == [("aten", 0)]
    assert "not measured" in task.refusals(Effort.QUICK)["a"]


def test_only_engines_near_the_best_are_widened():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("near", 5), Fake("far", 5), Fake("broken", 5)], TARGET))
    task.take_known([row("near", us=140.0), row("far", us=160.0), row("broken", status=Status.TIMEOUT, reason="x")])
    task.take(row("near", 1, 100.0))
    assert {name for name, _ in names(task.widen(PROTOCOL, Effort.QUICK))} == {"near"}
    assert {name for name, _ in names(task.widen(PROTOCOL, Effort.FULL))} == {"near"}


def test_a_cost_model_that_promises_more_than_the_best_gives_an_engine_another_chance():
    hopeful = Fake("hopeful", 4, estimate=lambda k: 500.0 - 150 * k)
    task = TuningTask(SearchSpace(PROBLEM, [Fake("best"), hopeful], TARGET))
    task.take_known([row("best", us=100.0), row("hopeful", us=400.0)])
    assert names(task.widen(PROTOCOL, Effort.QUICK))[0] == ("hopeful", 3)


def test_engines_without_hope_are_not_tried_at_effort_quick():
    def engines():
        models = [Fake("hopeless", 5, lambda k: 999.0), Fake("hopeful", 1, lambda k: 300.0)]
        return [Fake("plain"), *models, Fake("aten", 1, lambda k: 1e6)]

    task = TuningTask(SearchSpace(PROBLEM, engines(), TARGET))
    first = task.first_look(PROTOCOL, Effort.QUICK)
    assert names(first) == [("aten", 0), ("plain", 0)]
    answer(task, first, lambda *_: 100.0)
    second = task.first_look(PROTOCOL, Effort.QUICK)
    assert names(second) == [("hopeful", 0)]
    answer(task, second, lambda *_: 100.0)
    assert task.first_look(PROTOCOL, Effort.QUICK) is None
    assert task.refusals(Effort.QUICK)["hopeless"].startswith(
        "not tried at effort quick: its cost model expects 999 us, the best takes 100"
    )
    assert task.widen(PROTOCOL, Effort.QUICK) is None
    answer(task, task.finals(PROTOCOL, Effort.QUICK), lambda *_: 110.0)
    assert task.is_done(PROTOCOL, Effort.QUICK)

    # Another search decides the same, though the best is no longer quite what it was; a full one tries everything.
    known = list(task.rows.values())
    again = TuningTask(SearchSpace(PROBLEM, engines(), TARGET))
    again.take_known([row(r.config.engine, us=400.0, samples=9) for r in known])
    assert again.is_done(PROTOCOL, Effort.QUICK)
    assert "hopeless" in again.refusals(Effort.QUICK)
    full = TuningTask(SearchSpace(PROBLEM, engines(), TARGET))
    full.take_known(known)
    assert not full.is_done(PROTOCOL, Effort.FULL)
    assert names(full.first_look(PROTOCOL, Effort.FULL)) == [("hopeless", 0)]
    assert not full.refusals(Effort.FULL)


def test_where_all_others_fail_hopeless_engines_are_tried():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Fake("slow", 1, lambda k: 1e9)], TARGET))
    task.take_known([row("aten", status=Status.OUT_OF_MEMORY, us=0.0, samples=0, reason="x")])
    assert names(task.first_look(PROTOCOL, Effort.QUICK)) == [("slow", 0)]


def test_the_cost_model_orders_the_settings():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("a", 12, estimate=lambda k: abs(k - 6.2))], TARGET))
    task.take_known([row("a", us=100.0)])
    assert [k for _, k in names(task.widen(PROTOCOL, Effort.FULL))] == [6, 7, 5, 8, 4, 9, 3, 10, 2, 11, 1]
    assert [k for _, k in names(task.widen(PROTOCOL, Effort.QUICK))] == [6, 7, 5, 8]


def test_after_the_favourites_come_neighbours_of_the_best():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("a", 40)], TARGET))
    task.take_known([row("a", us=100.0)])
    first = task.widen(PROTOCOL, Effort.QUICK)
    assert [k for _, k in names(first)] == [1, 2, 3, 4]
    answer(task, first, lambda _, k: 90.0 - k)
    second = task.widen(PROTOCOL, Effort.QUICK)
    assert [k for _, k in names(second)] == [5, 6, 7, 8]
    answer(task, second, lambda _, k: 90.0 - k)
    assert task.widen(PROTOCOL, Effort.QUICK) is None


@pytest.mark.parametrize(
    ("trusted", "own", "most"),
    [(True, None, QUICK_CONFIGS), (False, None, QUICK_COMPILED_CONFIGS), (True, 2, 2), (False, 0, 0)],
)
def test_quick_tries_a_few_settings_full_all(trusted, own, most):
    for effort, wanted in ((Effort.QUICK, 1 + most), (Effort.FULL, 60)):
        engine = Fake("a", 60, trusted=trusted)
        engine.quick_settings = own
        task = TuningTask(SearchSpace(PROBLEM, [engine], TARGET))
        answer(task, task.first_look(PROTOCOL, effort), lambda _, k: 100.0)
        while request := task.widen(PROTOCOL, effort):
            assert len(request.configs) <= MAX_REQUEST_CONFIGS
            answer(task, request, lambda _, k: 100.0)
        assert len(task.rows) == wanted


def test_finals_are_the_best_few_and_the_baseline_until_the_best_has_all_samples():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), *(Fake(name) for name in "abcde")], TARGET))
    task.take_known([row("aten", us=500.0), *(row(name, us=100.0 + i) for i, name in enumerate("abcde"))])
    request = task.finals(PROTOCOL, Effort.QUICK)
    assert [name for name, _ in names(request)] == ["aten", "a", "b", "c"]
    assert request.rounds == 9
    # All finalists turn out slower than the two that were not asked: those are asked too, then it is over.
    answer(task, request, lambda name, _: 500.0 if name == "aten" else 200.0)
    again = task.finals(PROTOCOL, Effort.QUICK)
    assert [name for name, _ in names(again)] == ["aten", "d", "e", "a"]
    answer(task, again, lambda name, _: 90.0)
    assert task.is_done(PROTOCOL, Effort.QUICK)
    assert task.finals(PROTOCOL, Effort.QUICK) is None


def test_slow_finalists_are_timed_half_as_often_and_that_is_enough():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Fake("a")], TARGET))
    task.take_known([row("aten", us=200_000.0), row("a", us=100_000.0)])
    request = task.finals(PROTOCOL, Effort.QUICK)
    assert request.rounds == 5
    answer(task, request, lambda name, _: 100_000.0)
    assert task.is_done(PROTOCOL, Effort.QUICK)


def test_a_runner_that_never_gives_all_samples_ends_the_finals_too():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Fake("a")], TARGET))
    task.take_known([row("aten"), row("a", us=50.0)])
    assert task.finals(PROTOCOL, Effort.QUICK) is not None
    assert not task.is_done(PROTOCOL, Effort.QUICK)
    assert task.finals(PROTOCOL, Effort.QUICK) is None


def test_a_full_search_starts_from_a_quick_one():
    quick, full = Protocol("wall", few=3, rounds=9), Protocol("wall", few=3, rounds=21)
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Fake("a", 20)], TARGET))
    task.take_known([row("aten", us=100.0, samples=9), row("a", us=50.0, samples=7)])
    assert task.is_done(quick, Effort.QUICK)
    assert not task.is_done(full, Effort.FULL)
    assert len(names(task.widen(full, Effort.FULL))) == 19
    assert task.finals(full, Effort.FULL).rounds == 21


def test_a_new_engine_reopens_a_problem():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Fake("new")], TARGET))
    task.take_known([row("aten", samples=9)])
    assert not task.is_done(PROTOCOL, Effort.QUICK)
    assert names(task.first_look(PROTOCOL, Effort.QUICK)) == [("new", 0)]


def test_deterministic_excludes_with_a_reason():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Fake("dice")], TARGET, deterministic=True))
    task.take_known([row("aten", us=100.0), row("dice", us=1.0, deterministic=False)])
    assert [name for name, _ in names(task.finals(PROTOCOL, Effort.QUICK))] == ["aten"]
    found = {r.config.engine: r for r in task.result_rows()}
    assert found["aten"].ok
    assert found["dice"].status is Status.UNSUPPORTED
    assert "different bits" in found["dice"].reason
    read_record(to_record(found["dice"]))  # a row that the database takes: no figures beside a status that is not ok


class Unsteady(Fake):
    """Says of its first settings that they are."""

    def __init__(self, name, count=1, unsteady=1):
        super().__init__(name, count)
        self.known = unsteady

    def nondeterminism_reason(self, problem, knobs, target):
        return "aten.cumsum.default may give different bits from run to run" if knobs["k"] < self.known else ""


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_known_to_differ_from_run_to_run_is_not_measured_where_that_is_out(asked):
    """Nor are rows taken that were measured before it was known."""
    task = TuningTask(
        SearchSpace(PROBLEM, [Unsteady("aten"), Unsteady("a", 2), Fake("b")], TARGET, deterministic=asked)
    )
    task.take_known([row("aten", us=1.0), row("a", 0, us=1.0)])
    assert names(task.first_look(PROTOCOL, Effort.QUICK)) == ([("a", 1), ("b", 0)] if asked else [("b", 0)])
    assert {r.config.engine for r in task.result_rows()} == (set() if asked else {"aten", "a"})
    assert list(task.refusals(Effort.QUICK)) == (["aten"] if asked else [])
    assert "aten.cumsum.default" in task.refusals(Effort.QUICK).get("aten", "aten.cumsum.default")
    assert "deterministic" in task.refusals(Effort.QUICK).get("aten", "deterministic")


def test_nothing_that_is_known_to_differ_is_predicted():
    task = TuningTask(SearchSpace(PROBLEM, [Unsteady("aten")], TARGET, deterministic=True))
    task.predict(TimePredictor.from_rows([]), PROTOCOL.id)
    assert task.result_rows() == []


def test_an_engine_that_raises_about_its_bits_is_out():
    class Raises(Fake):
        def nondeterminism_reason(self, problem, knobs, target):
            raise KeyError("op")

    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Raises("a")], TARGET, deterministic=True))
    assert names(task.first_look(PROTOCOL, Effort.QUICK)) == [("aten", 0)]
    assert "raised KeyError" in task.refusals(Effort.QUICK)["a"]


@pytest.mark.parametrize("asked", [False, True])
def test_settings_for_the_same_bits_are_looked_at_where_they_are_asked_for(asked):
    class Library(Fake):
        def space(self, problem, target):
            return [Knobs(), Knobs.of(deterministic=True)]

    task = TuningTask(SearchSpace(PROBLEM, [Library("aten"), Fake("a")], TARGET, deterministic=asked))
    request = task.first_look(PROTOCOL, Effort.QUICK)
    assert [dict(c.knobs) for c in request.configs] == [{"deterministic": True} if asked else {}, {"k": 0}]


def test_when_everything_failed_it_is_over():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten", 3), Fake("a", 3)], TARGET))
    task.take_known([row(name, status=Status.WRONG_RESULT, us=0, samples=0, reason="x") for name in ("aten", "a")])
    assert task.is_done(PROTOCOL, Effort.QUICK)
    assert task.widen(PROTOCOL, Effort.FULL) is None
    assert task.finals(PROTOCOL, Effort.FULL) is None


def test_an_engine_that_raises_says_no():
    class Raises(Fake):
        def space(self, problem, target):
            raise KeyError("block_m")

    support, space = query_engine(Raises("a"), PROBLEM, TARGET)
    assert not support
    assert "raised KeyError" in support.reason
    assert not space
    support, _ = query_engine(Fake("a", 0), PROBLEM, TARGET)
    assert support.reason == "offers no knobs for this problem"


def test_a_broken_cost_model_is_none():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Fake("a", 4, lambda k: {}[k])], TARGET))
    assert names(task.first_look(PROTOCOL, Effort.QUICK)) == [("aten", 0), ("a", 0)]


def test_neighbours_differ_in_one_knob_nearest_first():
    space = [Knobs.of(m=m, n=n, word=w) for m in (16, 32, 64) for n in (1, 2) for w in ("a", "b")]
    here = Knobs.of(m=16, n=1, word="a")
    found = neighbours(here, space)
    assert found[-1] == Knobs.of(m=64, n=1, word="a")
    assert set(found) == {
        Knobs.of(m=32, n=1, word="a"), Knobs.of(m=64, n=1, word="a"), Knobs.of(m=16, n=2, word="a"),
        Knobs.of(m=16, n=1, word="b"),
    }  # fmt: skip
    assert neighbours(here, [Knobs.of(other=1), here]) == []


def test_neighbours_by_a_word_come_in_the_order_of_the_space():
    space = [Knobs.of(plan=word, fused=True) for word in ("m", "z", "a", "l")]
    assert neighbours(space[0], space) == space[1:]


def test_a_predicted_setting_that_an_engine_does_not_have_here_is_left_out():
    class Picky(Fake):
        def workspace_bytes(self, problem, knobs):
            if knobs["k"] == 1:
                raise InputError("k", knobs["k"], "another")
            return 7

    other = LinearProblem(2, 8, 5)
    times = {("aten", 0): 10.0, ("a", 0): 5.0, ("a", 1): 4.0}
    rows = [replace(row(name, k, us, 9), problem=other.key) for (name, k), us in times.items()]
    for engine, expected in ((Fake("a", 4), {0, 1}), (Picky("a", 4), {0})):
        task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), engine], TARGET))
        task.predict(TimePredictor.from_rows(rows), PROTOCOL.id)
        assert {found.knobs["k"] for found in task.predicted if found.engine == "a"} == expected


@pytest.mark.parametrize("memory_counts", [False, True])
def test_a_library_is_asked_for_the_workspace_of_what_may_be_chosen_alone(memory_counts):
    asked = []

    class Slow(Fake):
        def asks_for_workspace(self, problem, knobs):
            return knobs["k"] > 0

        def workspace_bytes(self, problem, knobs):
            asked.append(knobs["k"])
            return 7

    other = LinearProblem(2, 8, 5)
    times = {("aten", 0): 10.0, ("a", 0): 5.0, ("a", 1): 4.0, ("a", 2): 6.0, ("a", 3): 3.0}
    rows = [replace(row(name, k, us, 9), problem=other.key) for (name, k), us in times.items()]
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Slow("a", 4)], TARGET, memory_counts=memory_counts))
    task.predict(TimePredictor.from_rows(rows), PROTOCOL.id)
    assert sorted(asked) == ([0, 1, 2, 3] if memory_counts else [0, 1, 3])
    assert {row.config.knobs["k"] for row in task.result_rows() if row.config.engine == "a"} == set(asked)
    assert min(task.result_rows(), key=lambda row: row.median_us).config.knobs["k"] == 3


class Roomy(Fake):
    """Setting k wants 1000 - 100 k bytes."""

    def workspace_bytes(self, problem, knobs):
        return 1000 - 100 * knobs["k"]


@pytest.mark.parametrize("fits", [2, 9])
def test_where_there_is_no_memory_settings_that_want_less_are_tried(fits):
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Roomy("roomy", 6)], TARGET))
    for stage in (task.first_look, task.widen, task.finals):
        while request := stage(PROTOCOL, Effort.QUICK):
            for c in request.configs:
                short = c.engine == "roomy" and c.knobs["k"] < fits
                found = (
                    {"us": 0.0, "samples": 0, "status": Status.OUT_OF_MEMORY, "reason": "out of memory"}
                    if short
                    else {}
                )
                task.take(
                    row(c.engine, c.knobs["k"], **{"us": 50.0 if c.engine == "roomy" else 100.0, "samples": 9, **found})
                )
    best = min((r for r in task.result_rows() if r.ok), key=lambda r: r.median_us)
    assert (best.config.engine, best.config.knobs["k"]) == (("roomy", fits) if fits < 6 else ("aten", 0))


def test_an_engine_that_failed_for_another_reason_is_left_alone():
    task = TuningTask(SearchSpace(PROBLEM, [Fake("aten"), Roomy("roomy", 6)], TARGET))
    task.take(row("aten"))
    task.take(row("roomy", 0, 0.0, 0, Status.COMPILE_ERROR, reason="broken"))
    assert task.widen(PROTOCOL, Effort.QUICK) is None


def test_random_races_end_with_a_thorough_winner():
    """For all drawn times, anew each time, the stages end, never ask twice for nothing, and the winner is thorough."""
    for seed in range(60):
        rng = random.Random(seed)
        engines = [Fake("aten"), *(Fake(f"e{i}", rng.randint(1, 30)) for i in range(rng.randint(0, 5)))]
        task = TuningTask(SearchSpace(PROBLEM, engines, TARGET))
        effort = rng.choice([Effort.QUICK, Effort.FULL])
        asked = 0
        for stage in (TuningTask.first_look, TuningTask.widen, TuningTask.finals):
            while request := stage(task, PROTOCOL, effort):
                asked += 1
                assert asked < 100
                assert len(set(request.configs)) == len(request.configs)
                for c in request.configs:
                    if rng.random() < 0.15:
                        task.take(row(c.engine, c.knobs["k"], 0.0, 0, Status.LAUNCH_ERROR, reason="x"))
                    elif rng.random() < 0.15:
                        task.take(row(c.engine, c.knobs["k"], 1e6, 1))
                    else:
                        task.take(row(c.engine, c.knobs["k"], rng.uniform(10, 100), max(5, request.rounds)))
        right = [r for r in task.rows.values() if r.ok]
        best = min(right, key=lambda r: r.median_us, default=None)
        assert best is None or PROTOCOL.is_thorough(best.samples) or best.samples == 1
        fresh = TuningTask(SearchSpace(PROBLEM, engines, TARGET))
        fresh.take_known(list(task.rows.values()))
        assert fresh.is_done(PROTOCOL, effort) or any(r.samples == 1 for r in (best, *fresh._baseline()))


assert FINALISTS == 3  # the tests above count on it
