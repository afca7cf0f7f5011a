import os

from convoy.measurement import detect_target
from convoy.measurement.device.memory_limit import BUILDERS_FRACTION, CONTEXT_BYTES, MAX_DEVICE_BUILDERS
from convoy.measurement.processes.builders import BuilderPool, builder_pools, max_builders
from convoy.measurement.processes.child import ChildRunner
from convoy.measurement.runner import Request
from convoy.problem import EngineConfig, Epilogue, Knobs, LinearProblem
from convoy.target import Target
from convoy.tuning_profile import recorded_profile
from tests.unit.measurement import faulty_engines as engines

PROBLEM = LinearProblem(2, 8, 4, epilogue=Epilogue(bias=True))
ENTRIES = engines.extra(engines.Builder, engines.Right)


def request(*tiles):
    return Request(PROBLEM, tuple(EngineConfig("builder", 1, Knobs.of(tile=tile)) for tile in tiles), 3)


def test_candidates_are_built_once_elsewhere_and_crashes_are_left_to_the_clock(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOY_TEST_BUILDS", str(tmp_path))
    pool = BuilderPool(detect_target("cpu"), ENTRIES, timeout_s=20.0, most=1)
    try:
        trusted = Request(PROBLEM, (EngineConfig("right"),), 3)
        pool.submit([request(1, 13, 2), trusted, request(2, 3)])
        assert not pool.is_built(request(3))
        assert pool.is_built(trusted)
        pool.wait(request(1, 13, 2, 3))
        assert pool.is_built(request(1, 13, 2, 3))
        built = sorted(path.name.split("-") for path in tmp_path.iterdir())
        assert sorted(tile for _, tile in built) == ["1", "13", "2", "3"]
        assert len({pid for pid, _ in built}) == 2  # the one that crashed was replaced
        pool.submit([request(1, 2, 3)])
        pool.wait(request(1, 2, 3))
        assert len(list(tmp_path.iterdir())) == 4
    finally:
        pool.close()
        pool.close()


def test_the_profile_has_each_builders_start_and_builds(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOY_TEST_BUILDS", str(tmp_path))
    with recorded_profile() as recorder:
        pool = BuilderPool(detect_target("cpu"), ENTRIES, timeout_s=20.0, most=1)
        pool.submit([request(1, 2)])
        pool.wait(request(1, 2))
        pool.close()
    spans = [(span.phase, span.detail) for span in recorder.profile().spans if span.thread != 0]
    assert spans == [("builder", "start"), ("builder", "builder"), ("builder", "builder")]


def test_a_closed_pool_keeps_nobody_waiting():
    pool = BuilderPool(detect_target("cpu"), ENTRIES, timeout_s=20.0, most=2)
    pool.submit([request(1, 2, 3, 4, 5)])
    pool.close()
    pool.wait(request(1, 2, 3, 4, 5))
    assert not any(thread.is_alive() for thread in pool._threads)


def test_only_a_gpu_has_builders():
    runner = ChildRunner(detect_target("cpu"), extra_engines=ENTRIES)
    runner.prepare([request(1)])
    assert not runner._builders
    runner = ChildRunner(Target("cuda", "test", "sm_90", 1, 1, 1), extra_engines=ENTRIES)
    runner.prepare([Request(PROBLEM, (EngineConfig("right"),), 3)])
    assert len(runner._builders) == 2
    assert not any(pool._threads for pool in runner._builders)  # nothing to compile, nothing started
    assert runner.is_ready(request(1))  # nothing of it was begun
    with runner._builders[0]._changed:
        runner._builders[0]._pending.add((PROBLEM.key, request(1).configs[0]))
    assert not runner.is_ready(request(1))
    assert runner.is_ready(Request(PROBLEM, (EngineConfig("right"),), 3))
    runner.close()


def test_a_limit_of_memory_holds_for_builders_contexts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    target = Target("cuda", "test", "sm_90", 132, 1 << 40, 1)

    def on_device(limit: int | None) -> list[int]:
        return [pool._most for pool in builder_pools(target, (), 1.0, limit) if pool.on_device]

    assert on_device(2 * CONTEXT_BYTES) == []
    assert on_device(int(CONTEXT_BYTES / BUILDERS_FRACTION)) == [1]
    assert on_device(CONTEXT_BYTES << 10) == on_device(None) == [MAX_DEVICE_BUILDERS]
    (hidden,) = builder_pools(target, (), 1.0, 2 * CONTEXT_BYTES)
    assert hidden._most == max_builders(target, on_device=False) == 15
