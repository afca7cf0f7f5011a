"""Rows of a device of the same kind shorten the search, and never end it too early."""

from dataclasses import replace

import pytest

from convoy.measurement import protocol_for
from convoy.perfdb import Database, shipped
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Knobs, SubgraphProblem
from convoy.settings import Effort
from convoy.target import Target
from convoy.tune.prior_rows import PredictorSource
from convoy.tune.transfer_hints import MAX_HINTS, NEAR_BEST_RATIO, hints_from_rows, predicting_targets, related_targets
from tests.unit.tune.test_search import GPU, PROBLEM, Timed, run
from tests.unit.tune.test_tuning_task import Fake

KIN = replace(GPU, name="its kin")
PROTOCOL = protocol_for(Effort.QUICK, "cuda").id


def row(engine, k, us, *, status=Status.OK, target=KIN):
    config = EngineConfig(engine, 1, Knobs.of(k=k))
    reason = "" if status is Status.OK else "failed there"
    return Measurement(PROBLEM.key, config, target.digest, PROTOCOL, status, 9 if us else 0, us, reason=reason)


KNOWN = (row("aten", 0, 50.0), row("fast", 3, 10.0), row("fast", 0, 30.0), row("near", 1, 11.0), row("slow", 0, 40.0))


def asked(runner):
    return {(config.engine, config.knobs["k"]) for _, config, _ in runner.asked}


def engines(fakes):
    return fakes(Fake("aten"), Fake("fast", 40), Fake("near", 40), Fake("slow", 40), Fake("new"))


@pytest.fixture
def known(database):
    database.put(KNOWN, targets=[KIN])
    return database


def test_kin_are_devices_with_the_same_cores_the_same_software_first():
    older = replace(KIN, versions=(("torch", "1"),))
    other = replace(KIN, units=114)
    assert related_targets(GPU, [older, other, GPU, KIN]) == [KIN, older]
    cpu = replace(GPU, device="cpu")
    assert related_targets(cpu, [replace(cpu, name="another")]) == []
    assert related_targets(cpu, [replace(cpu, versions=(("torch", "1"),))]) != []


def test_rows_measured_here_hide_no_related_devices_and_a_cpus_shipped_rows_predict_there(monkeypatch, tmp_path):
    piece = SubgraphProblem("a subgraph", "nhwc")

    def of(engine, target, us=9.0):
        return replace(
            row(engine, 0, us, target=target), problem=piece.key, protocol=protocol_for(Effort.QUICK, target.device).id
        )

    def related(target, database):
        clock = protocol_for(Effort.QUICK, target.device)
        found = PredictorSource([], target, clock, database, None).related_rows(piece)
        return [(one.config.engine, one.target, one.median_us) for one in found]

    cpu = Target("cpu", "one", "avx2", 2, 1 << 30, 1 << 20)
    like, alone = replace(cpu, name="another"), replace(GPU, name="alone", arch="sm_80")
    shipped.write_shipped([of("a", cpu), of("b", cpu)], tmp_path, {cpu.digest: cpu})
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path)
    with Database.memory(shipped=True) as database:
        database.put([of("a", GPU, 5.0), of("a", alone), of("b", KIN)], targets=[GPU, KIN, alone])
        assert related(GPU, database) == [("b", KIN.digest, 9.0)]
        assert related(alone, database) == []
        database.put([of("a", cpu, 5.0), of("a", like, 5.0)], targets=[cpu, like])
        assert related(cpu, database) == [("b", cpu.digest, 9.0)]
        assert {engine for engine, *_ in related(like, database)} == {"a", "b"}


def test_all_cpus_predict_for_each_other_and_those_with_the_same_instructions_come_first():
    cpu = Target("cpu", "one", "avx2", 2, 1 << 30, 1 << 20)
    wide, like = replace(cpu, arch="avx512", units=8), replace(cpu, name="another")
    older = replace(cpu, versions=(("torch", "1"),))
    assert predicting_targets(cpu, [wide, like, GPU, older, cpu]) == [older, like, wide]
    assert predicting_targets(GPU, [cpu, replace(GPU, units=114), KIN]) == [KIN]
    assert (cpu.time_factor(wide), wide.time_factor(cpu), cpu.time_factor(like), GPU.time_factor(KIN)) == (
        1 / 8,
        8,
        1,
        1,
    )


def test_hints_are_the_settings_near_the_best():
    valid = {EngineConfig("e", 1, Knobs.of(k=k)) for k in range(20)} | {EngineConfig("aten", 1, Knobs.of(k=0))}
    rows = [row("e", k, 10.0 + 0.1 * k) for k in range(20)] + [
        row("e", 99, 1.0),
        row("aten", 0, 10.0 * NEAR_BEST_RATIO + 1),
    ]
    found = hints_from_rows(rows, valid, KIN, GPU)
    assert [config.knobs["k"] for config in found.configs] == list(range(MAX_HINTS))
    assert found.slowdowns == {"e": 1.0}
    assert hints_from_rows(rows, valid, replace(KIN, versions=(("torch", "1"),)), GPU).slowdowns == {}
    assert hints_from_rows(rows[-1:], valid, KIN, GPU).configs == ()
    assert hints_from_rows([row("e", 1, 0.0, status=Status.WRONG_RESULT)], valid, KIN, GPU).configs == ()


def test_only_what_was_near_the_best_there_is_measured_here_and_engines_unknown_there(known, fakes):
    runner = Timed(lambda engine, k: 90.0 if engine in ("aten", "new") else 20.0 + k, GPU)
    found = run([PROBLEM], engines(fakes), known, runner, GPU)
    assert asked(runner) == {("aten", 0), ("fast", 3), ("near", 1), ("new", 0)}
    assert "on its kin it took 4.00 times" in found.refusals[PROBLEM.key]["slow"]
    again = Timed(lambda engine, k: 1.0, GPU)
    found = run([PROBLEM], engines(fakes), known, again, GPU)
    assert not again.asked
    assert found.from_database == 4


def test_effort_full_takes_no_hints(known, fakes):
    runner = Timed(lambda engine, k: 20.0 + k, GPU)
    run([PROBLEM], engines(fakes), known, runner, GPU, effort=Effort.FULL)
    assert {("slow", 39), ("fast", 39), ("near", 39)} <= asked(runner)


def test_where_all_hints_fail_the_search_is_as_without(known, fakes):
    runner = Timed(lambda engine, k: 0.0 if (engine, k) in {("fast", 3), ("near", 1)} else 50.0 - k, GPU)
    run([PROBLEM], engines(fakes), known, runner, GPU)
    assert {("slow", 0), ("fast", 0), ("near", 0)} <= asked(runner)
    assert len(asked(runner)) > 8


def test_what_was_searched_here_is_not_searched_again_for_hints(database, fakes):
    runner = Timed(lambda engine, k: 20.0 + k, GPU)
    run([PROBLEM], engines(fakes), database, runner, GPU)
    database.put(KNOWN, targets=[KIN])
    again = Timed(lambda engine, k: 1.0, GPU)
    run([PROBLEM], engines(fakes), database, again, GPU)
    assert not again.asked


def test_other_software_adds_to_the_search_and_takes_nothing_from_it(database, fakes):
    older = replace(KIN, versions=(("torch", "1"),))
    database.put([replace(r, target=older.digest) for r in KNOWN], targets=[older])
    runner = Timed(lambda engine, k: 20.0 + k, GPU)
    run([PROBLEM], engines(fakes), database, runner, GPU)
    assert {("fast", 3), ("near", 1), ("slow", 0), ("fast", 0), ("near", 0)} <= asked(runner)


def test_effort_none_predicts_from_kin_where_nothing_else_is_known(known, fakes):
    found = run([PROBLEM], engines(fakes), known, Timed(lambda engine, k: 1.0, GPU), GPU, effort=Effort.NONE)
    times = {r.config: r.median_us for r in found.rows[PROBLEM.key]}
    assert min(times, key=times.__getitem__) == KNOWN[1].config


def test_what_is_hinted_at_does_not_wait_for_others(known, fakes):
    def guess(k):
        return 1.0

    ids = fakes(Fake("aten"), Fake("fast", 40, guess), Fake("near", 40, guess), Fake("slow", 40, guess))
    runner = Timed(lambda engine, k: 90.0 if engine == "aten" else 20.0 + k, GPU)
    run([PROBLEM], ids, known, runner, GPU)
    first = [(config.engine, config.knobs["k"]) for _, config, _ in runner.asked[:3]]
    assert first == [("aten", 0), ("fast", 3), ("near", 1)]
    assert sum(map(bool, runner.waves)) == 2  # one with few samples, one with all


def test_rows_of_an_earlier_protocol_are_hints_and_rule_nothing_out(database, fakes):
    (earlier,) = protocol_for(Effort.QUICK, "cuda").earlier
    database.put([replace(r, protocol=earlier, target=GPU.digest) for r in KNOWN], targets=[GPU])
    runner = Timed(lambda engine, k: 20.0 + k, GPU)
    found = run([PROBLEM], engines(fakes), database, runner, GPU)
    assert found.from_database == 0
    assert {("aten", 0), ("fast", 3), ("near", 1), ("slow", 0), ("new", 0)} <= asked(runner)
    again = Timed(lambda engine, k: 1.0, GPU)
    run([PROBLEM], engines(fakes), database, again, GPU)
    assert not again.asked


def test_effort_none_predicts_from_an_earlier_protocol_where_there_is_nothing_newer(database, fakes):
    (earlier,) = protocol_for(Effort.QUICK, "cuda").earlier
    database.put([replace(r, protocol=earlier, target=GPU.digest) for r in KNOWN], targets=[GPU])
    found = run([PROBLEM], engines(fakes), database, Timed(lambda engine, k: 1.0, GPU), GPU, effort=Effort.NONE)
    times = {r.config: r.median_us for r in found.rows[PROBLEM.key]}
    assert min(times, key=times.__getitem__) == KNOWN[1].config


GLUE = SubgraphProblem(
    "graph 1\ninput %v0: fp16[8,64,56,56]\n%v1: fp16[8,64,56,56] = aten.relu.default(%v0)\nreturn %v1\n",
    "nhwc",
    6422528,
)


def glue_row(engine, us, *, target=KIN, samples=9):
    config = EngineConfig(engine, 1, Knobs.of(k=0))
    return Measurement(GLUE.key, config, target.digest, PROTOCOL, Status.OK, samples, us)


@pytest.mark.parametrize(("there", "here"), [(20.0, 20.0), (1.0, 5.0)])
def test_a_subgraphs_time_on_its_kin_is_its_prediction_and_never_below_the_floor(fakes, database, there, here):
    database.put([glue_row("aten", 300.0), glue_row("fast", there)], targets=[KIN])
    ids = fakes(Fake("aten"), Fake("fast"), Fake("new"))
    found = run(
        [GLUE],
        ids,
        database,
        Timed(lambda *_: pytest.fail("measured"), GPU),
        GPU,
        effort="none",
        floor_of=lambda: lambda _: 5.0,
    )
    rows = {row.config.engine: row for row in found.rows[GLUE.key]}
    assert rows["aten"].median_us == 300.0
    assert rows["fast"].median_us == pytest.approx(here, rel=0.01)
    assert rows["fast"].predicted
    assert rows["fast"].reason == "measured on a related device"
    assert all(row.predicted for row in rows.values())
    assert database.lookup(GLUE.key, GPU.digest, PROTOCOL) == []  # it is no row of this device
