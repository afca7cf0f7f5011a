import dataclasses

import pytest
import torch

from convoy.engines.manifest import load_engine
from convoy.errors import InputError, LaunchError
from convoy.measurement import ReplayRunner, detect_target, protocol_for
from convoy.measurement.in_process import InProcessRunner
from convoy.measurement.processes.child import ChildRunner
from convoy.perfdb.row import Measurement, Status
from convoy.pipeline.measure_net import prediction_notes
from convoy.problem import (
    ConvProblem,
    EngineConfig,
    Epilogue,
    Knobs,
    LayoutProblem,
    LinearProblem,
    SubgraphProblem,
    TensorSpec,
)
from convoy.settings import Effort, Settings
from convoy.support import Support
from convoy.target import Target
from convoy.tune import search
from convoy.tune.criteria import Criteria, TreeLeaf, kind_name
from convoy.tune.criteria_file import criteria_json, user_file
from convoy.tune.staged_search import describe_problem
from tests.unit.measurement import faulty_engines as engines
from tests.unit.tune.test_tuning_task import Fake

CPU = Target("cpu", "test", "generic", torch.get_num_threads(), 1 << 34, 0)
GPU = Target("cuda", "test", "sm_90", 132, 1 << 34, 0)
PROBLEM = LinearProblem(2, 8, 4, epilogue=Epilogue(bias=True))
OTHER = LinearProblem(3, 8, 4, epilogue=Epilogue(bias=True))
TEXT = "graph 1\ninput %x: fp32[2,3,4,4]\n%y: fp32[2,3,4,4] = aten.relu.default(%x)\nreturn %y\n"


class Timed(ReplayRunner):
    """Answers with a time for each (engine, knob k) from a function, as many samples as asked."""

    def __init__(self, time_of, target=CPU):
        super().__init__([])
        self.time_of, self.target, self.waves = time_of, target, []

    def prepare(self, requests):
        self.waves.append([request.problem.key for request in requests])

    def measure(self, request, protocol):
        for config in request.configs:
            self.asked.append((request.problem.key, config, request.rounds))
            us = self.time_of(config.engine, config.knobs["k"])
            status = Status.OK if us else Status.WRONG_RESULT
            yield Measurement(
                request.problem.key, config, self.target.digest, protocol.id, status,
                request.rounds if us else 0, us, reason="" if us else "wrong",
            )  # fmt: skip


def no_floors():
    return None


def run(
    problems, ids, database, runner, target=CPU, on_progress=None, baseline_only=(), floor_of=no_floors, **settings
):
    return search(
        problems,
        engine_ids=ids,
        target=target,
        settings=Settings(**settings),
        database=database,
        runner=runner,
        on_progress=on_progress,
        baseline_only=baseline_only,
        floor_of=floor_of,
    )


def test_a_second_search_measures_nothing(fakes, database):
    ids = fakes(Fake("aten"), Fake("fast", 30), Fake("slow", 30), Fake("wrong", 30))
    times = {"aten": 100.0, "fast": 50.0, "slow": 400.0, "wrong": 0.0}
    first = Timed(lambda engine, k: times[engine] + 0.01 * k if times[engine] else 0.0)
    found = run([PROBLEM, OTHER, PROBLEM], ids, database, first)
    assert found.measured == len({(key, config) for key, config, _ in first.asked}) > 20
    assert found.from_database == 0

    second = Timed(lambda engine, k: pytest.fail("measured again"))
    again = run([PROBLEM, OTHER], ids, database, second)
    assert not second.asked
    assert not any(second.waves)
    assert (again.measured, again.from_database) == (0, found.measured)
    for key in (PROBLEM.key, OTHER.key):
        assert sorted(map(repr, again.rows[key])) == sorted(map(repr, found.rows[key]))


def test_duplicates_are_measured_once(fakes, database):
    runner = Timed(lambda engine, k: 10.0)
    run([PROBLEM] * 5, fakes(Fake("aten")), database, runner)
    assert len(runner.asked) == 1


def test_effort_none_looks_into_the_database_alone(fakes, database):
    ids = fakes(Fake("aten"), Fake("fast"))
    runner = Timed(lambda engine, k: 10.0)
    found = run([PROBLEM], ids, database, runner, effort=Effort.NONE)
    assert [(row.config.engine, row.samples) for row in found.rows[PROBLEM.key]] == [("aten", 0)]  # a guess
    assert (found.measured, found.from_database, found.predicted, runner.asked) == (0, 0, 1, [])
    run([PROBLEM], ids, database, Timed(lambda engine, k: 10.0))
    found = run([PROBLEM], ids, database, runner, effort=Effort.NONE)
    assert len(found.rows[PROBLEM.key]) == 2
    assert (found.measured, found.from_database, found.predicted, runner.asked) == (0, 2, 0, [])


def test_floors_are_asked_for_where_something_is_predicted_and_they_hold(fakes, database):
    ids = fakes(Fake("aten"), Fake("fast"))
    runner = Timed(lambda engine, k: 10.0)
    floor = {PROBLEM.key: 300.0, OTHER.key: 40.0}.__getitem__
    asked = []

    def floors():
        asked.append("asked")
        return lambda problem: floor(problem.key)

    def search_with(problems, effort=Effort.NONE):
        return run(problems, ids, database, runner, effort=effort, floor_of=floors)

    found = search_with([PROBLEM, OTHER])
    assert (found.predicted, found.predicted_from, asked) == (2, 0, ["asked"])
    search_with([OTHER], Effort.QUICK)
    assert asked == ["asked"]  # all was measured: 10 us, below the floor
    found = search_with([PROBLEM, OTHER])
    assert (found.predicted, found.predicted_from) == (1, 2)
    assert {row.median_us for row in found.rows[OTHER.key]} == {10.0}
    predicted = found.rows[PROBLEM.key]
    assert {row.config.engine for row in predicted} == {"aten", "fast"}
    assert all(row.predicted and row.median_us >= 300.0 for row in predicted)


def test_effort_none_asks_the_criteria_beside_the_database(fakes, database, tmp_path):
    path = tmp_path / "perf.db"
    ids = fakes(Fake("aten"), Fake("a", estimate=lambda k: 10.0), Fake("b", estimate=lambda k: 10.0))
    regret = {"b": 0.0, "a": 0.3, "aten": 0.6}
    criteria = Criteria(CPU, "v", dict.fromkeys(ids, 1), (kind_name(PROBLEM),), TreeLeaf(12, regret), 12)
    user_file(CPU, path).write_text(criteria_json(criteria))
    found = run([PROBLEM], ids, database, Timed(lambda engine, k: pytest.fail("measured")), effort="none", db=path)
    rows = sorted(found.rows[PROBLEM.key], key=lambda row: row.median_us)
    assert [row.config.engine for row in rows] == ["b", "a", "aten"]
    assert all("criteria" in row.reason and not row.samples for row in rows)
    user_file(CPU, path).write_text("{}")
    with pytest.raises(InputError, match="criteria"):
        run([PROBLEM], ids, database, ReplayRunner([]), effort="none", db=path)


def test_full_effort_tries_the_whole_space(fakes, database):
    runner = Timed(lambda engine, k: 100.0 - k)
    found = run([PROBLEM], fakes(Fake("aten"), Fake("a", 50)), database, runner, effort=Effort.FULL)
    assert len(found.rows[PROBLEM.key]) == 51
    best = min(found.rows[PROBLEM.key], key=lambda row: row.median_us)
    assert best.config.knobs["k"] == 49
    assert best.samples == protocol_for(Effort.FULL, "cpu").rounds


def test_only_and_deny_leave_the_baseline(fakes, database):
    ids = fakes(Fake("aten"), Fake("a"), Fake("b"))

    def engines_of(**settings):
        found = run([PROBLEM], ids, database, Timed(lambda engine, k: 10.0), **settings)
        return {row.config.engine for row in found.rows[PROBLEM.key]}

    assert engines_of() == {"aten", "a", "b"}
    assert engines_of(only_engines=("b",)) == {"aten", "b"}
    assert engines_of(deny_engines=("b", "aten")) == {"aten", "a"}


def test_the_oracle_is_no_candidate(fakes, database):
    oracle = Fake("oracle")
    oracle.family = "reference"
    found = run([PROBLEM], fakes(Fake("aten"), oracle), database, Timed(lambda engine, k: 10.0))
    assert {row.config.engine for row in found.rows[PROBLEM.key]} == {"aten"}


def test_refusals_are_kept_with_their_reasons(fakes, database):
    from convoy.support import Support

    ids = fakes(Fake("aten"), Fake("no", support=Support.no("needs groups = 1, got 4")))
    found = run([PROBLEM], ids, database, Timed(lambda engine, k: 10.0), baseline_only=())
    assert found.refusals == {PROBLEM.key: {"no": "needs groups = 1, got 4"}}
    assert [row.config.engine for row in found.rows[PROBLEM.key]] == ["aten"]


def test_texts_of_pieces_are_stored_with_their_rows(fakes, database):
    piece = SubgraphProblem(TEXT)
    run([piece], fakes(Fake("aten")), database, Timed(lambda engine, k: 10.0))
    assert database.text(piece.key) == TEXT


def test_on_a_cpu_a_problem_is_finished_before_the_next_begins(fakes, database):
    runner = Timed(lambda engine, k: 10.0)
    run([PROBLEM, OTHER], fakes(Fake("aten"), Fake("a", 3)), database, runner)
    keys = [key for key, _, _ in runner.asked]
    assert keys == sorted(keys, key=[PROBLEM.key, OTHER.key].index)


def test_on_a_gpu_each_stage_is_announced_for_all_problems_at_once(fakes, database):
    runner = Timed(lambda engine, k: 10.0, GPU)
    run([PROBLEM, OTHER], fakes(Fake("aten"), Fake("a", 3)), database, runner, target=GPU)
    assert runner.waves[0] == [PROBLEM.key, OTHER.key]
    keys = [key for key, _, _ in runner.asked]
    assert keys[:4] == [PROBLEM.key] * 2 + [OTHER.key] * 2
    assert keys[4] == PROBLEM.key


def test_problems_that_share_data_stand_side_by_side(fakes, database):
    conv = ConvProblem(1, 3, 8, 8, 4, 3, 3)
    fused = ConvProblem(1, 3, 8, 8, 4, 3, 3, epilogue=Epilogue(activation="relu"))
    problems = [conv, PROBLEM, fused, conv.with_layout("nhwc")]
    runner = Timed(lambda engine, k: 10.0)
    run(problems, fakes(Fake("aten")), database, runner)
    assert [key for key, _, _ in runner.asked] == [conv.key, fused.key, conv.with_layout("nhwc").key, PROBLEM.key]


@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "cuda"])
def test_progress_counts_up_to_the_end(fakes, database, target):
    seen = []
    ids = fakes(Fake("aten"), Fake("a", 5))
    for _ in range(2):
        seen.clear()
        run([PROBLEM, OTHER], ids, database, Timed(lambda e, k: 10.0, target), target, lambda *at: seen.append(at))
        done = [at[0] for at in seen]
        assert done == sorted(done)
        assert len({at[1] for at in seen}) == 1
        assert seen[-1][0] == seen[-1][1] > 0
        assert all(isinstance(at[2], str) and at[2] for at in seen)


def test_an_interruption_keeps_what_was_measured(fakes, database):
    class Interrupted(Timed):
        def measure(self, request, protocol):
            rows = super().measure(request, protocol)
            yield next(rows)
            if request.problem == OTHER:
                raise KeyboardInterrupt
            yield from rows

    ids = fakes(Fake("aten"), Fake("a"))
    with pytest.raises(KeyboardInterrupt):
        run([PROBLEM, OTHER], ids, database, Interrupted(lambda engine, k: 10.0))
    protocol = protocol_for("quick", "cpu").id
    assert len(database.lookup(PROBLEM.key, CPU.digest, protocol)) == 2
    assert len(database.lookup(OTHER.key, CPU.digest, protocol)) == 1
    runner = Timed(lambda engine, k: 10.0)
    found = run([PROBLEM, OTHER], ids, database, runner)
    assert {key for key, _, _ in runner.asked} == {OTHER.key}
    assert found.from_database == 2  # the interrupted problem's finals measure its known row once more


def test_engines_that_cannot_be_imported_are_the_users_input(database):
    runner = ReplayRunner([])
    for entry in ("x=no_such_module:X", "x=tests.unit.measurement.faulty_engines:NoSuchClass"):
        with pytest.raises(InputError, match="engine: got 'x', expected an engine that can be imported"):
            run([PROBLEM], ["aten", "x"], database, runner, engines=(entry,))
    with pytest.raises(InputError, match="engine"):
        run([PROBLEM], ["aten", "nobody"], database, runner)


def test_labels_are_short():
    layout = LayoutProblem(TensorSpec((1, 3, 8, 8), "fp32"), "nchw", "nhwc")
    found = [
        describe_problem(p)
        for p in (ConvProblem(1, 3, 8, 8, 4, 3, 3), PROBLEM, SubgraphProblem(TEXT, label="relu"), layout)
    ]
    assert all(0 < len(text) < 60 for text in found)
    assert len(set(found)) == 4


# --- with real runners --------------------------------------------------------------------------------------------------

FAULTS = (
    engines.Right, engines.Knobbed, engines.Wrong, engines.Untouched, engines.Overrun, engines.Scribbles,
    engines.NoCompiler, engines.Greedy, engines.Raises, engines.RaisesWhenAsked, engines.Oracle, engines.Random,
)  # fmt: skip


def test_faulty_engines_cost_a_row_each_and_are_not_tried_again(database):
    ids = ["aten", *(cls.id for cls in FAULTS)]
    settings = {"engines": engines.extra(*FAULTS)}
    found = run([PROBLEM], ids, database, InProcessRunner(CPU, extra_engines=settings["engines"]), **settings)
    rows = found.rows[PROBLEM.key]
    by_engine = {row.config.engine: row for row in rows}
    assert {name for name, row in by_engine.items() if row.ok} == {"aten", "right", "knobbed", "random"}
    assert by_engine["wrong"].status is Status.WRONG_RESULT
    assert by_engine["no_compiler"].reason.startswith("the compiler said no")
    assert "AttributeError" in found.refusals[PROBLEM.key]["raises_when_asked"]
    assert "oracle" not in by_engine

    again = run([PROBLEM], ids, database, Timed(lambda engine, k: pytest.fail("tried again")), **settings)
    assert again.measured == 0
    assert len(again.rows[PROBLEM.key]) == len(rows)

    strict = run([PROBLEM], ids, database, ReplayRunner([]), deterministic=True, effort="none", **settings)
    assert {row.config.engine for row in strict.rows[PROBLEM.key] if row.ok} == {"aten", "right", "knobbed"}


def test_knobs_near_the_best_are_found(database):
    entries = engines.extra(engines.Knobbed)
    runner = InProcessRunner(CPU, extra_engines=entries)
    found = run([PROBLEM], ["knobbed"], database, runner, engines=entries)
    best = min((row for row in found.rows[PROBLEM.key] if row.ok), key=lambda row: row.median_us)
    assert best.config == EngineConfig("knobbed", 1, Knobs.of(delay_us=0))
    assert best.samples > 3


def test_crashes_cost_rows_in_a_child_and_a_second_search_starts_none(database):
    target = detect_target("cpu")
    faults = (engines.Exit, engines.Right)
    entries = engines.extra(*faults)
    ids = ["aten", *(cls.id for cls in faults)]
    runner = ChildRunner(target, extra_engines=entries, timeout_s=20.0)
    try:
        found = run([PROBLEM], ids, database, runner, target, engines=entries)
    finally:
        runner.close()
    statuses = {row.config.engine: row.status for row in found.rows[PROBLEM.key]}
    assert statuses == {"aten": Status.OK, "right": Status.OK, "exit": Status.LAUNCH_ERROR}
    assert load_engine("aten").version == next(
        r.config.version for r in found.rows[PROBLEM.key] if r.config.engine == "aten"
    )
    idle = ChildRunner(target, extra_engines=entries)
    again = run([PROBLEM], ids, database, idle, target, engines=entries)
    assert (again.measured, again.from_database, idle.starts) == (0, 3, 0)


def test_a_lost_context_ends_the_search_and_keeps_the_row(database, monkeypatch):
    from convoy.measurement.failure import ContextLostError, Failure

    def lose(bench, config, extra):
        raise ContextLostError(Failure(Status.LAUNCH_ERROR, "illegal memory access"))

    monkeypatch.setattr("convoy.measurement.in_process.prepare", lose)
    with pytest.raises(LaunchError, match="illegal memory access"):
        run([PROBLEM], ["aten"], database, InProcessRunner(CPU))
    [row] = database.rows()
    assert (row.status, row.reason) == (Status.LAUNCH_ERROR, "illegal memory access")


def test_on_a_gpu_what_wants_no_compiler_comes_first(fakes, database):
    only = Fake("compiled", trusted=False)
    only.supports = lambda problem, target: Support.yes() if problem == PROBLEM else Support.no("too small")
    runner = Timed(lambda engine, k: 10.0, GPU)
    run([PROBLEM, OTHER], fakes(Fake("aten"), only), database, runner, GPU)
    assert runner.waves[0] == [OTHER.key, PROBLEM.key]
    assert [key for key, _, _ in runner.asked[:3]] == [OTHER.key, PROBLEM.key, PROBLEM.key]


def test_on_a_gpu_a_fused_piece_that_a_cost_model_favours_is_measured_with_the_likely_layers(fakes, database):
    own = Fake("own", estimate=lambda k: 1.0, trusted=False)
    own.estimates_subgraphs = own.fuses_subgraphs = True
    piece = SubgraphProblem(TEXT, "nhwc", 1 << 10)
    run([PROBLEM], fakes(Fake("aten")), database, Timed(lambda engine, k: 10.0, GPU), GPU)  # something to predict from
    runner = Timed(lambda engine, k: 10.0, GPU)
    run([piece], fakes(Fake("aten"), own), database, runner, GPU)
    assert runner.waves[0] == [piece.key]
    assert [config.engine for _, config, _ in runner.asked[:2]] == ["own", "aten"]


class Full(Timed):
    """Without room for the engine `big`."""

    crowded = ("big",)

    def measure(self, request, protocol):
        for row in super().measure(request, protocol):
            full = row.config.engine in self.crowded
            yield (
                dataclasses.replace(row, status=Status.OUT_OF_MEMORY, samples=0, median_us=0.0, reason="full")
                if full
                else row
            )


@pytest.mark.parametrize(("target", "asked_again"), [(GPU, {"big"}), (CPU, set())])
def test_what_had_no_room_on_a_gpu_is_tried_again(fakes, database, target, asked_again):
    """On a CPU the system ended the process, which is not to happen twice."""

    ids = fakes(Fake("aten"), Fake("big"))
    first = Full(lambda engine, k: 10.0, target)
    rows = run([PROBLEM], ids, database, first, target).rows[PROBLEM.key]
    assert {row.config.engine: row.status for row in rows}["big"] is Status.OUT_OF_MEMORY
    kept = {
        row.config.engine
        for row in database.lookup(PROBLEM.key, target.digest, protocol_for("quick", target.device).id)
    }
    assert kept == {"aten", "big"} - asked_again
    second = Full(lambda engine, k: 10.0, target)
    run([PROBLEM], ids, database, second, target)
    assert {config.engine for _, config, _ in second.asked} == asked_again


@pytest.mark.parametrize("crowded", [("aten", "big"), ("aten",), ("big",)])
def test_where_there_is_no_room_for_the_baseline_it_is_predicted(fakes, database, crowded, tmp_path, request):
    """A device that others fill, or a limit: selection needs a time of every node, and what it takes in the net it has there."""
    if crowded == ("aten", "big"):  # nothing is measured: the rows that Convoy ships are all there is to predict from
        database = type(database).open(tmp_path / "shipped.db", shipped=True)
        request.addfinalizer(database.close)
    ids = fakes(Fake("aten"), Fake("big"), Fake("wrong"))
    runner = Full(lambda engine, k: 0.0 if engine == "wrong" else 10.0, GPU)
    runner.crowded = crowded
    found = run([PROBLEM, OTHER], ids, database, runner, GPU)
    rows = {row.config.engine: row for row in found.rows[PROBLEM.key]}
    assert rows["wrong"].status is Status.WRONG_RESULT
    if "aten" in crowded:
        assert rows["aten"].ok
        assert rows["aten"].samples == 0
        assert rows["big"].ok is ("big" not in crowded)
        assert (found.predicted, found.baseline_out_of_memory) == (2, 2)
        assert "PyTorch ran out of memory on 2 of them" in prediction_notes(found)[0]
    else:
        assert rows["big"].status is Status.OUT_OF_MEMORY
        assert (found.predicted, found.baseline_out_of_memory) == (0, 0)
        assert prediction_notes(found) == []


def test_a_whole_net_is_measured_or_unknown_and_has_engines_of_its_own(fakes, database):
    own = Fake("own")
    own.only_its_patterns = True
    ids = fakes(Fake("aten"), own)

    def search_whole(effort, runner):
        return search(
            [PROBLEM, OTHER], engine_ids=ids, target=CPU, settings=Settings(effort=effort), database=database,
            runner=runner, whole={PROBLEM.key},
        )  # fmt: skip

    guessed = search_whole("none", Timed(lambda engine, k: 10.0))
    assert not guessed.rows[PROBLEM.key]
    assert [row.config.engine for row in guessed.rows[OTHER.key]] == ["aten"]
    found = search_whole("quick", Timed(lambda engine, k: 10.0))
    assert {row.config.engine for row in found.rows[PROBLEM.key]} == {"aten", "own"}
    assert {row.config.engine for row in found.rows[OTHER.key]} == {"aten"}
    again = search_whole("quick", Timed(lambda engine, k: pytest.fail("measured again")))
    assert again.measured == 0


@pytest.mark.parametrize(("target", "time_s", "first"), [(CPU, 1000.0, True), (CPU, 60.0, False), (CPU, None, False)])
def test_on_a_cpu_what_builds_long_comes_first_if_the_time_is_limited_and_long(fakes, database, target, time_s, first):
    slow = Fake("slow", trusted=False)
    slow.build_patience, slow.only_its_patterns = 5.0, True
    runner = Timed(lambda engine, k: 10.0)
    search(
        [OTHER, PROBLEM], engine_ids=fakes(Fake("aten"), slow), target=target,
        settings=Settings(**({} if time_s is None else {"time_s": time_s})), database=database, runner=runner,
        whole={PROBLEM.key},
    )  # fmt: skip
    assert (runner.asked[0][0] == PROBLEM.key) == first


def test_on_a_gpu_the_net_as_a_whole_begins_to_compile_before_anything_is_measured(fakes, database):
    slow = Fake("slow", trusted=False)
    slow.build_patience, slow.only_its_patterns = 5.0, True
    runner = Timed(lambda engine, k: 10.0, GPU)
    search(
        [OTHER, PROBLEM], engine_ids=fakes(Fake("aten"), slow), target=GPU, settings=Settings(effort="full"), database=database,
        runner=runner, whole={PROBLEM.key},
    )  # fmt: skip
    assert runner.waves[0] == [PROBLEM.key]
    assert runner.asked[0][0] == OTHER.key
