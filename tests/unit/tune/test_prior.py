"""The search compiles and measures first what predictions favour: cut short, it has measured what may win."""

from dataclasses import replace

import pytest

from convoy.measurement import protocol_for
from convoy.perfdb.row import Measurement, Status
from convoy.pipeline.measure_net import prediction_notes
from convoy.problem import EngineConfig, Knobs
from convoy.settings import Effort
from convoy.tune.prior import MAX_PRIOR_CONFIGS, Prior
from tests.unit.tune.test_search import GPU, OTHER, PROBLEM, Timed, run
from tests.unit.tune.test_tuning_task import Fake

PROTOCOL = protocol_for(Effort.QUICK, "cuda").id
TIMES = {"aten": 50.0, "cudnn": 30.0, "fast": 20.0, "near": 25.0, "slow": 45.0}


def time_of(engine, k):
    return TIMES[engine] + (7 - k) % 8 if engine in ("fast", "near", "slow") else TIMES[engine]


def engines(fakes):
    def guess(k):
        return 30.0 + k

    compiled = (Fake(name, 40, guess, trusted=False) for name in ("slow", "near", "fast"))
    return fakes(Fake("aten"), Fake("cudnn"), *compiled)


def elsewhere(engine, k, us, problem=OTHER, target=GPU):
    config = EngineConfig(engine, 1, Knobs.of(k=k))
    return Measurement(problem.key, config, target.digest, PROTOCOL, Status.OK, 9, us)


@pytest.fixture
def known(database):
    rows = [elsewhere(name, k, time_of(name, k)) for name in ("slow", "near", "fast") for k in (0, 3, 7)]
    database.put([*rows, elsewhere("aten", 0, 50.0)], targets=[GPU])
    return database


def order(runner):
    return [(config.engine, config.knobs["k"]) for key, config, _ in runner.asked if key == PROBLEM.key]


def test_the_settings_predicted_to_win_are_the_first_that_are_measured(known, fakes):
    runner = Timed(time_of, GPU)
    found = run([PROBLEM], engines(fakes), known, runner, GPU)
    first = order(runner)
    assert first[:MAX_PRIOR_CONFIGS] == [("fast", 7), ("fast", 3)]
    assert first[MAX_PRIOR_CONFIGS : MAX_PRIOR_CONFIGS + 2] == [("aten", 0), ("cudnn", 0)]
    assert runner.waves[0] == [PROBLEM.key]  # builders have them before anything is measured
    assert {("slow", 0), ("near", 0), ("fast", 0)} <= set(first)  # nothing is left out for it
    best = min((row for row in found.rows[PROBLEM.key] if row.ok), key=lambda row: row.median_us)
    assert (best.config.engine, best.config.knobs["k"]) == ("fast", 7)


class Building(Timed):
    """The builds of a request are done when so many others have been measured."""

    def __init__(self, after):
        super().__init__(time_of, GPU)
        self.after = after

    def is_ready(self, request):
        return len({key for key, _, _ in self.asked}) >= self.after


def test_what_needs_no_compiler_is_measured_while_builds_are_on_their_way(known, fakes):
    more = [PROBLEM, replace(PROBLEM, k=16), replace(PROBLEM, k=32)]
    runner = Building(2)
    run(more, engines(fakes), known, runner, GPU)
    asked = [(next(i for i, p in enumerate(more) if p.key == key), c.engine) for key, c, _ in runner.asked]
    assert asked[:4] == [(0, "aten"), (0, "cudnn"), (1, "aten"), (1, "cudnn")]
    assert asked[4:10] == [(i, "fast") for i in (0, 0, 1, 1, 2, 2)]
    assert asked[10:12] == [(2, "aten"), (2, "cudnn")]
    assert len(runner.asked) == len({(key, config, rounds) for key, config, rounds in runner.asked})


def test_builds_that_take_for_ever_are_waited_for(known, fakes):
    """Once nothing else is left to be done: the runner's limit ends what hangs."""
    runner = Building(1000)
    run([PROBLEM], engines(fakes), known, runner, GPU)
    assert order(runner)[: 2 + MAX_PRIOR_CONFIGS] == [("aten", 0), ("cudnn", 0), ("fast", 7), ("fast", 3)]


def test_a_search_that_is_cut_short_has_measured_them_everywhere(known, fakes):
    more = [PROBLEM, replace(PROBLEM, k=16), replace(PROBLEM, k=32)]

    def cut(done, total, message):
        if len(runner.asked) >= MAX_PRIOR_CONFIGS * len(more):
            raise KeyboardInterrupt

    runner = Timed(time_of, GPU)
    with pytest.raises(KeyboardInterrupt):
        run(more, engines(fakes), known, runner, GPU, on_progress=cut)
    for problem in more:
        assert {(c.engine, c.knobs["k"]) for key, c, _ in runner.asked if key == problem.key} == {
            ("fast", 7),
            ("fast", 3),
        }


@pytest.mark.parametrize("effort", [Effort.QUICK, Effort.FULL])
def test_where_nothing_is_known_or_all_is_wanted_the_defaults_come_first(effort, database, known, fakes):
    runner = Timed(time_of, GPU)
    store = known if effort is Effort.FULL else database
    if effort is Effort.QUICK:
        store = type(database).open(database.path.with_name("empty.db"), shipped=False)
    run([PROBLEM], engines(fakes), store, runner, GPU, effort=effort)
    assert {engine for engine, _ in order(runner)[:5]} == set(TIMES)


def test_a_problem_that_was_searched_is_not_predicted(known, fakes):
    run([PROBLEM], engines(fakes), known, Timed(time_of, GPU), GPU)
    again = Timed(time_of, GPU)
    run([PROBLEM], engines(fakes), known, again, GPU)
    assert not again.asked
    assert not any(again.waves)


def hopeless(fakes):
    return fakes(Fake("aten"), Fake("cudnn"), Fake("slow", 8, lambda k: 1000.0, trusted=False))


def test_where_what_is_compiled_has_no_hope_a_second_search_reads_no_rows_of_others(database, fakes, monkeypatch):
    """A start from the database alone must not wait for predictions that nobody asks for."""
    run([PROBLEM], hopeless(fakes), database, Timed(time_of, GPU), GPU)
    rows = database.lookup(PROBLEM.key, GPU.digest, PROTOCOL)
    assert {row.config.engine for row in rows} == {"aten", "cudnn"}
    monkeypatch.setattr(type(database), "times", lambda *_: pytest.fail("read the rows of other problems"))
    again = Timed(time_of, GPU)
    run([PROBLEM], hopeless(fakes), database, again, GPU)
    assert not again.asked
    assert not any(again.waves)


def test_what_is_predicted_to_be_far_behind_is_not_compiled_first(database, fakes):
    far = [elsewhere("slow", k, 900.0) for k in range(8)]
    database.put([*far, elsewhere("aten", 0, 50.0), elsewhere("cudnn", 0, 30.0)], targets=[GPU])
    runner = Timed(time_of, GPU)
    run([PROBLEM], hopeless(fakes), database, runner, GPU)
    assert {engine for engine, _ in order(runner)} == {"aten", "cudnn"}


class Slow(Timed):
    """Every request takes a second."""

    def __init__(self, now):
        super().__init__(time_of, GPU)
        self.now = now

    def measure(self, request, protocol):
        self.now[0] += 1.0
        yield from super().measure(request, protocol)


@pytest.fixture
def now(monkeypatch):
    found = [50.0]
    monkeypatch.setattr("convoy.deadline._monotonic", lambda: found[0])
    return found


def test_where_time_is_up_the_rest_is_predicted(known, fakes, now):
    """Three requests fit: what is predicted to win of all three problems, and nothing to compare it with."""
    more = [PROBLEM, replace(PROBLEM, k=16), replace(PROBLEM, k=32)]
    runner = Slow(now)
    found = run(more, engines(fakes), known, runner, GPU, time_s=2.5)
    assert len(runner.asked) == 6
    assert found.cut == "after 2.5 s, with 0 of 9 stages of the search done"
    assert found.predicted == 3
    for problem in more:
        rows = {(row.config.engine, row.config.knobs["k"]): row for row in found.rows[problem.key] if row.ok}
        best = min(rows.values(), key=lambda row: row.median_us)
        assert (best.config.engine, best.config.knobs["k"], best.samples) == ("fast", 7, 3)
        assert rows["aten", 0].samples == rows["near", 7].samples == 0
    assert prediction_notes(found)[0].startswith(
        "3 of the net's 3 different layers and subgraphs were never measured on this device, because measuring ended"
    )
    again = run(more, engines(fakes), known, Slow(now), GPU)
    assert (again.cut, again.predicted) == ("", 0)
    assert prediction_notes(again) == []


def test_a_search_that_ends_in_time_is_whole(known, fakes, now):
    found = run([PROBLEM], engines(fakes), known, Slow(now), GPU, time_s=1000.0)
    assert (found.cut, found.predicted) == ("", 0)


def test_where_time_is_short_what_is_there_for_comparison_comes_last(database, fakes, now):
    more = [PROBLEM, replace(PROBLEM, k=16)]
    for limits, expected in (({"time_s": 1000.0}, more[1]), ({}, more[0])):
        runner = Slow(now)
        fresh = type(database).open(database.path.with_name(f"{len(limits)}.db"), shipped=False)
        run(more, fakes(Fake("aten"), Fake("cudnn")), fresh, runner, GPU, baseline_only=[PROBLEM.key], **limits)
        assert runner.asked[0][0] == expected.key


def test_where_the_likeliest_disappoints_other_predictions_are_not_believed_either(known, fakes, now):
    """`fast` takes three times what it was expected to; `near`, that was never tried here, is not taken for the faster one."""

    def here(engine, k):
        return 60.0 if engine == "fast" else time_of(engine, k)

    other = replace(PROBLEM, k=16)
    runner = Slow(now)
    runner.time_of = here
    found = run([other], engines(fakes), known, runner, GPU, time_s=0.5)
    rows = {(row.config.engine, row.config.knobs["k"]): row for row in found.rows[other.key] if row.ok}
    assert rows["fast", 7].samples == 3
    assert rows["near", 7].samples == 0
    assert rows["near", 7].median_us > 60.0


def row(config, us, status=Status.OK):
    return Measurement("p", config, "t", PROTOCOL, status, 3, us)


def test_disappointment_is_a_mean_of_those_that_ran_and_never_below_one():
    a, b, c = (EngineConfig("fast", 1, Knobs.of(k=k)) for k in range(3))
    hopes = Prior.from_predictions([row(a, 10.0), row(b, 20.0), row(c, 30.0)], {a, b, c}, 4.0)
    assert dict(hopes.times_us) == {a: 10.0, b: 20.0}
    assert hopes.untried([a]) == [b]
    assert hopes.underestimate({}) == 1.0
    assert hopes.underestimate({a: row(a, 40.0), b: row(b, 20.0)}) == pytest.approx(2.0)
    assert hopes.underestimate({a: row(a, 40.0), b: row(b, 0.0, Status.WRONG_RESULT)}) == pytest.approx(4.0)
    assert hopes.underestimate({a: row(a, 5.0)}) == 1.0
    assert Prior().underestimate({a: row(a, 5.0)}) == 1.0


def test_what_another_device_hints_at_is_measured_before_what_needs_no_compiler(database, fakes, now):
    kin = replace(GPU, name="its kin")
    rows = [elsewhere(name, 5, us, PROBLEM, kin) for name, us in (("near", 20.0), ("fast", 21.0), ("slow", 60.0))]
    database.put([*rows, elsewhere("aten", 0, 50.0, PROBLEM, kin)], targets=[kin])
    runner = Slow(now)
    run([PROBLEM], engines(fakes), database, runner, GPU, time_s=0.5)
    assert order(runner) == [("near", 5), ("fast", 5)]


def test_what_is_hopeless_or_needs_no_compiler_is_not_expected():
    a, b, plain = (
        EngineConfig("fast", 1, Knobs.of(k=0)),
        EngineConfig("slow", 1, Knobs.of(k=0)),
        EngineConfig("aten", 1),
    )
    assert list(Prior.from_predictions([row(plain, 9.0), row(a, 10.0), row(b, 50.0)], {a, b}, 4.0).times_us) == [a]


def test_a_search_that_is_done_looks_up_no_rows_of_related_devices(database, fakes, monkeypatch):
    run([PROBLEM], hopeless(fakes), database, Timed(time_of, GPU), GPU)
    asked = []
    lookup = type(database).lookup
    monkeypatch.setattr(type(database), "lookup", lambda self, *key: asked.append(key[1]) or lookup(self, *key))
    kin = replace(GPU, name="its kin")
    database.put([], targets=[kin])
    again = run([PROBLEM], hopeless(fakes), database, Timed(time_of, GPU), GPU)
    assert again.measured == 0
    assert set(asked) == {GPU.digest}
