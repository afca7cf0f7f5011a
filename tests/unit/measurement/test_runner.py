import dataclasses

import pytest
import torch

from convoy.measurement import in_process
from convoy.measurement.in_process import InProcessRunner
from convoy.measurement.protocol import Protocol
from convoy.measurement.reference_data import ReferenceData
from convoy.measurement.replay import ReplayRunner
from convoy.measurement.runner import Request
from convoy.perfdb.record import read_record, to_record
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Epilogue, Knobs, LinearProblem, SubgraphProblem
from convoy.target import Target
from tests.unit.measurement import faulty_engines as engines

TARGET = Target("cpu", "test", "generic", torch.get_num_threads(), 1 << 34, 1 << 16, (("torch", "2"), ("cxx", "g++ 1")))
PROTOCOL = Protocol("wall", min_sample_us=50, few=3, rounds=5)
PROBLEM = LinearProblem(2, 8, 4, epilogue=Epilogue(bias=True))

HARMLESS = (
    engines.Right, engines.Scratch, engines.Random, engines.Slow, engines.Wrong, engines.Untouched, engines.Overrun,
    engines.Scribbles, engines.NoCompiler, engines.BadBuild, engines.Greedy, engines.GreedyTorch, engines.Raises,
    engines.RaisesWhenTimed, engines.RaisesWhenAsked,
)  # fmt: skip


def measure(*classes, runner=None, best_us=0.0, problem=PROBLEM, rounds=3):
    runner = runner or InProcessRunner(TARGET, extra_engines=engines.extra(*classes))
    configs = tuple(EngineConfig(cls.id) for cls in classes)
    rows = list(runner.measure(Request(problem, configs, rounds, best_us), PROTOCOL))
    assert sorted(row.config.engine for row in rows) == sorted(cls.id for cls in classes)
    return {row.config.engine: row for row in rows}


def test_one_row_for_each_whatever_the_others_do():
    rows = measure(*HARMLESS)
    assert {engine: str(row.status) for engine, row in rows.items()} == {
        "right": "ok", "scratch": "ok", "random": "ok", "slow": "ok", "wrong": "wrong_result",
        "untouched": "wrong_result", "overrun": "wrong_result", "scribbles": "wrong_result",
        "no_compiler": "compile_error", "bad_build": "compile_error", "greedy": "out_of_memory",
        "greedy_torch": "out_of_memory", "raises": "launch_error", "raises_when_timed": "launch_error",
        "raises_when_asked": "unsupported",
    }  # fmt: skip
    for row in rows.values():
        assert row.ok or row.reason
        assert row.ok == (row.median_us > 0)
        assert read_record(to_record(row)) == row
    assert rows["raises_when_timed"].reason == "ValueError: tired"
    assert rows["right"].samples >= 2
    assert not rows["random"].deterministic
    assert rows["scratch"].workspace_bytes == 1000
    assert rows["right"].resident_bytes == 4 * (8 * 4 + 4)


def test_a_row_says_what_it_holds_for():
    row = measure(engines.Right)["right"]
    assert (row.problem, row.target, row.protocol) == (PROBLEM.key, TARGET.digest, PROTOCOL.id)
    assert row.versions == "torch=2 cxx=g++_1"
    assert row.date.endswith("Z")
    assert 0 < row.error < 1e-6


def test_slow_candidates_are_pruned_and_the_baseline_never():
    rows = measure(engines.Right, engines.Slow)
    assert rows["right"].samples >= 2
    assert (rows["slow"].samples, rows["slow"].status) == (1, Status.OK)
    assert rows["slow"].median_us > 20_000
    assert measure(engines.Slow)["slow"].samples >= 2
    assert measure(engines.Slow, best_us=1.0)["slow"].samples == 1

    runner = InProcessRunner(TARGET, extra_engines=("aten=tests.unit.measurement.faulty_engines:Slow",))
    [row] = runner.measure(Request(PROBLEM, (EngineConfig("aten"),), 3, best_us=1.0), PROTOCOL)
    assert row.samples >= 2


@pytest.mark.parametrize(("late", "runs", "samples"), [(0, 1, 3), (1, 2, 3), (4, 5, 3), (99, 7, 1)])
def test_who_is_late_for_a_moment_on_a_cpu_is_not_pruned(monkeypatch, late, runs, samples):
    """Another program takes a core for some milliseconds, often for two runs in a row."""
    taken = []

    def first_run(launch, device):
        taken.append(8000.0 if len(taken) < late else 30.0)
        return taken[-1]

    monkeypatch.setattr(in_process, "first_run_us", first_run)
    monkeypatch.setattr(in_process, "time_rounds", lambda launches, *_: [[30.0] * 3 for _ in launches])
    runner = InProcessRunner(TARGET, extra_engines=engines.extra(engines.Right))
    [row] = runner.measure(Request(PROBLEM, (EngineConfig("right"),), 3, best_us=20.0), PROTOCOL)
    assert (len(taken), row.samples) == (runs, samples)


@pytest.mark.parametrize(("device_us", "samples"), [(5.0, 3), (30_000.0, 1)])
def test_who_will_run_in_a_graph_is_not_pruned_for_what_the_host_takes(monkeypatch, device_us, samples):
    """A wrapper in Python may take the host far longer than the device."""
    graph = dataclasses.replace(PROTOCOL, clock="graph")
    monkeypatch.setattr(in_process, "HOST_US", float("inf"))
    monkeypatch.setattr(in_process, "replayed_us", lambda launch: device_us)
    monkeypatch.setattr(in_process, "time_rounds", lambda launches, *_: [[5.0] * 3 for _ in launches])
    runner = InProcessRunner(TARGET, extra_engines=engines.extra(engines.Slow))
    [row] = runner.measure(Request(PROBLEM, (EngineConfig("slow"),), 3, best_us=8.0), graph)
    assert (row.samples, row.median_us) == (samples, device_us)


def test_candidates_and_data_are_kept_for_the_next_request():
    builds = []
    runner = InProcessRunner(TARGET, extra_engines=engines.extra(engines.Right), announce=lambda *at: builds.append(at))
    measure(engines.Right, runner=runner)
    kept = runner._bench, runner._ready[EngineConfig("right")]
    measure(engines.Right, runner=runner)
    assert (runner._bench, runner._ready[EngineConfig("right")]) == kept
    other = LinearProblem(3, 8, 4, epilogue=Epilogue(bias=True))
    measure(engines.Right, runner=runner, problem=other)
    assert runner._bench.problem == other
    assert runner._ready[EngineConfig("right")] is not kept[1]
    runner.close()
    assert runner._bench is None


def test_what_begins_is_announced():
    seen = []
    runner = InProcessRunner(
        TARGET, extra_engines=engines.extra(engines.Right, engines.Wrong), announce=lambda *at: seen.append(at)
    )
    measure(engines.Wrong, engines.Right, runner=runner)
    phases = list(dict.fromkeys(seen))
    assert phases == [(-1, "data"), (0, "build"), (1, "build"), (1, "time")]


def no_room():
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_who_has_no_room_beside_those_that_wait_is_tried_again_when_they_are_through():
    """Only what it holds by itself may count against it."""
    seen = []

    class Crowded(engines.Right):
        id = "crowded"

        @staticmethod
        def body(run, buffers, workspace):
            if EngineConfig("right") in runner._ready:
                no_room()
            engines.compute(run, buffers, workspace)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "Crowded", Crowded, raising=False)
        runner = InProcessRunner(
            TARGET, extra_engines=engines.extra(engines.Right, Crowded, engines.GreedyTorch), announce=lambda *at: seen.append(at)
        )  # fmt: skip
        rows = measure(engines.Right, Crowded, engines.GreedyTorch, runner=runner)
        assert [rows[engine].status for engine in ("right", "crowded")] == [Status.OK, Status.OK]
        assert rows["greedy_torch"].status is Status.OUT_OF_MEMORY  # with the device to itself
        assert seen.index((0, "time")) < len(seen) - 1 - seen[::-1].index((1, "build"))
        rows = measure(Crowded, runner=runner)  # what an earlier request left goes as well
        assert rows["crowded"].ok


def test_data_that_has_no_room_beside_another_problems_is_made_without_it(monkeypatch):
    """Of the same layer in another memory format it could have been taken over."""
    kinds = []

    class Crowded(ReferenceData):
        def __init__(self, problem, target, sibling=None):
            kinds.append(sibling is not None)
            if sibling is not None:
                no_room()
            super().__init__(problem, target)

    monkeypatch.setattr(in_process, "ReferenceData", Crowded)
    runner = InProcessRunner(TARGET, extra_engines=engines.extra(engines.Right))
    relu = dataclasses.replace(PROBLEM, epilogue=Epilogue(bias=True, activation="relu"))
    other = LinearProblem(3, 8, 4, epilogue=Epilogue(bias=True))
    for problem in (PROBLEM, relu, relu, other):
        measure(engines.Right, runner=runner, problem=problem)
    assert kinds == [False, True, False, False]


@pytest.mark.parametrize("most", [1, 2, 0])
def test_where_not_all_can_be_timed_at_once_each_half_is_timed_by_itself(monkeypatch, most):
    whole, groups = in_process.time_rounds, []

    def crowded(launches, *rest):
        if len(launches) > most:
            no_room()
        groups.append(len(launches))
        return whole(launches, *rest)

    monkeypatch.setattr(in_process, "time_rounds", crowded)
    rows = measure(engines.Right, engines.Scratch, engines.Random)
    assert {str(row.status) for row in rows.values()} == {"ok" if most else "out_of_memory"}
    assert groups == {0: [], 1: [1, 1, 1], 2: [1, 2]}[most]


@pytest.mark.parametrize("cold", [False, True])
def test_copies_that_are_to_come_count_as_held(cold):
    """Under a limit: two wait together where they are timed with what is in the caches, and none where copies exceed these."""
    seen = []
    size = 4 * (8 * 4 + 4)
    target = dataclasses.replace(TARGET, cache_bytes=4 * size)
    classes = (engines.Right, engines.Scratch)
    runner = InProcessRunner(
        target, extra_engines=engines.extra(*classes), memory_bytes=int(4 * 5 * size), announce=lambda *at: seen.append(at)
    )  # fmt: skip
    configs = tuple(EngineConfig(cls.id) for cls in classes)
    rows = list(runner.measure(Request(PROBLEM, configs, 3, 0.0), dataclasses.replace(PROTOCOL, cold=cold)))
    assert all(row.ok for row in rows)
    assert (seen.index((0, "time")) < seen.index((1, "build"))) is cold


def test_candidates_that_hold_too_much_memory_are_timed_in_groups():
    target = Target("cpu", "test", "generic", 1, 4 * 200, 0)
    seen = []
    classes = (engines.Right, engines.Scratch, engines.Random)
    runner = InProcessRunner(target, extra_engines=engines.extra(*classes), announce=lambda *at: seen.append(at))
    rows = measure(*classes, runner=runner)
    assert all(row.ok for row in rows.values())
    order = list(dict.fromkeys(seen))
    assert order.index((1, "time")) < order.index((2, "build"))


def test_data_that_cannot_be_made_is_everyones_failure():
    rows = measure(engines.Right, engines.Wrong, problem=SubgraphProblem("no graph"))
    assert {row.status for row in rows.values()} == {Status.LAUNCH_ERROR}
    assert all(row.reason.startswith("test data could not be made: InputError") for row in rows.values())


def test_the_callers_grad_mode_is_left_alone():
    runner = InProcessRunner(TARGET, extra_engines=engines.extra(engines.Right))
    for _ in runner.measure(Request(PROBLEM, (EngineConfig("right"),), 2), PROTOCOL):
        assert torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_replay_answers_from_rows_and_notes_what_was_asked():
    known = Measurement(PROBLEM.key, EngineConfig("a"), "t", "p", Status.OK, 5, 1.0)
    runner = ReplayRunner([known])
    request = Request(PROBLEM, (EngineConfig("a"), EngineConfig("a", 1, Knobs.of(k=1))), 4)
    runner.prepare([request, request])
    first, second = runner.measure(request, PROTOCOL)
    assert first is known
    assert second.status is Status.UNSUPPORTED
    assert runner.asked == [(PROBLEM.key, config, 4) for config in request.configs]
    assert runner.prepared == 4


def test_timing_uses_the_protocol_of_the_request(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "convoy.measurement.in_process.time_rounds",
        lambda launches, protocol, rounds, device, announce: seen.append((len(launches), protocol, rounds)) or [[3.0] * rounds],
    )  # fmt: skip
    row = measure(engines.Right, rounds=4)["right"]
    assert seen == [(1, PROTOCOL, 4)]
    assert (row.samples, row.median_us, row.spread_us) == (4, 3.0, 0.0)
    assert row.median_us == pytest.approx(3.0)
