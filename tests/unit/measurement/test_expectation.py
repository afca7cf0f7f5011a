"""What predictions favour is compiled first, so that a search that is cut short has measured what is likely to win."""

import sys
from dataclasses import replace

import pytest
from test_search import GPU, OTHER, PROBLEM, Timed, run
from test_task import Fake

from convoy.measurement import protocol_for
from convoy.measurement.task import LIKELY
from convoy.perfdb.row import Measurement, Status
from convoy.pipeline.stages import prediction_notes
from convoy.problem import EngineConfig, Knobs
from convoy.settings import Effort

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


def test_the_settings_predicted_to_win_are_the_first_that_are_compiled(known, fakes):
    runner = Timed(time_of, GPU)
    found = run([PROBLEM], engines(fakes), known, runner, GPU)
    first = order(runner)
    assert first[:2] == [("aten", 0), ("cudnn", 0)]
    assert first[2 : 2 + LIKELY] == [("fast", 7), ("fast", 3)]
    assert runner.waves[0] == [PROBLEM.key]  # builders have them before anything is measured
    assert {("slow", 0), ("near", 0), ("fast", 0)} <= set(first)  # nothing is left out for it
    best = min((row for row in found.rows[PROBLEM.key] if row.ok), key=lambda row: row.median_us)
    assert (best.config.engine, best.config.knobs["k"]) == ("fast", 7)


def test_a_search_that_is_cut_short_has_measured_them_everywhere(known, fakes):
    more = [PROBLEM, replace(PROBLEM, k=16), replace(PROBLEM, k=32)]

    def cut(done, total, message):
        if sum(config.engine in ("slow", "near", "fast") for _, config, _ in runner.asked) >= LIKELY * len(more):
            raise KeyboardInterrupt

    runner = Timed(time_of, GPU)
    with pytest.raises(KeyboardInterrupt):
        run(more, engines(fakes), known, runner, GPU, on_progress=cut)
    for problem in more:
        asked = {(c.engine, c.knobs["k"]) for key, c, _ in runner.asked if key == problem.key}
        assert {("aten", 0), ("cudnn", 0), ("fast", 7)} <= asked


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
    monkeypatch.setattr(type(database), "related", lambda *_: pytest.fail("read the rows of other problems"))
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
    monkeypatch.setattr(sys.modules["convoy.measurement.search"].time, "monotonic", lambda: found[0])
    return found


def test_where_time_is_up_the_rest_is_predicted(known, fakes, now):
    """Three requests fit: what needs no compiler of all three problems, of none what is compiled."""
    more = [PROBLEM, replace(PROBLEM, k=16), replace(PROBLEM, k=32)]
    runner = Slow(now)
    found = run(more, engines(fakes), known, runner, GPU, tune_s=2.5)
    assert len(runner.asked) == 6
    assert found.cut == "after 2.5 s, with 0 of 9 stages of the search done"
    assert found.predicted == 3
    for problem in more:
        best = min((row for row in found.rows[problem.key] if row.ok), key=lambda row: row.median_us)
        assert (best.config.engine, best.samples) == ("fast", 0)
    assert prediction_notes(found)[0].startswith(
        "3 of 3 problems were never measured on this target, and measuring ended"
    )
    again = run(more, engines(fakes), known, Slow(now), GPU)
    assert (again.cut, again.predicted) == ("", 0)
    assert prediction_notes(again) == []


def test_a_search_that_ends_in_time_is_whole(known, fakes, now):
    found = run([PROBLEM], engines(fakes), known, Slow(now), GPU, tune_s=1000.0)
    assert (found.cut, found.predicted) == ("", 0)
