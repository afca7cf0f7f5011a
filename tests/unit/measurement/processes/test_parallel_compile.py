"""Compiling ahead: in other processes, only where it is worth their start, and only where processes are allowed."""

import os
import sys
from dataclasses import replace

import pytest

from convoy.measurement import ParallelCompile, detect_target
from convoy.measurement.processes import builders, parallel_compile
from convoy.measurement.processes.worker_server import can_fork
from convoy.measurement.runner import Request
from convoy.problem import EngineConfig, Epilogue, Knobs, LinearProblem
from convoy.settings import Settings
from tests.unit.measurement import faulty_engines as engines

PROBLEM = LinearProblem(2, 8, 4, epilogue=Epilogue(bias=True))
SETTINGS = Settings(engines=engines.extra(engines.Builder), timeout_s=20.0)
MANY = [(PROBLEM, EngineConfig("builder", 1, Knobs.of(tile=tile))) for tile in (1, 2, 3, 4, 5)]
WANTED = MANY[:3]
CUDA = replace(detect_target("cpu"), device="cuda")
"""A target whose builders compile, on a machine without one."""


def test_what_is_left_is_built_in_another_process(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOY_TEST_BUILDS", str(tmp_path))
    monkeypatch.setattr(builders, "MAX_BUILDERS", 1)
    with ParallelCompile(CUDA, SETTINGS) as pools:
        assert pools.build(WANTED, each_s=parallel_compile.WORTHWHILE_S)
        built = [path.name.split("-") for path in tmp_path.iterdir()]
        assert sorted(tile for _, tile in built) == ["1", "2", "3"]
        assert str(os.getpid()) not in {pid for pid, _ in built}
        threads = [thread for pool in pools._pools for thread in pool._threads]
    assert threads
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("target", "settings", "each_s"),
    [
        (CUDA, SETTINGS, 0.1),
        (CUDA, replace(SETTINGS, isolate=False), 100.0),
        (detect_target("cpu"), SETTINGS, 100.0),
    ],
    ids=["soon done here", "no further processes allowed", "cpu"],
)
def test_no_process_is_started_for_nothing(tmp_path, monkeypatch, target, settings, each_s):
    monkeypatch.setenv("CONVOY_TEST_BUILDS", str(tmp_path))
    with ParallelCompile(target, settings) as pools:
        assert not pools.build(WANTED, each_s)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not can_fork(), reason="needs fork, and files that are handed over")
def test_the_caller_builds_what_no_builder_has_come_to(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOY_TEST_BUILDS", str(tmp_path))
    monkeypatch.setattr(parallel_compile, "FEWEST_CORES", 1)
    monkeypatch.setattr(parallel_compile, "FEWEST_BUILDS", len(MANY))
    monkeypatch.setattr(builders, "usable_cores", lambda: 3)
    with ParallelCompile(CUDA, SETTINGS) as pools:
        pools.begin(MANY)
        assert not pools.build(MANY, each_s=parallel_compile.WORTHWHILE_S)  # their server still imports
        pool = pools._pools[0]
        pool.wait(Request(PROBLEM, tuple(config for _, config in MANY), 1))
        built = [path.name.split("-") for path in tmp_path.iterdir()]
        assert sorted(tile for _, tile in built) == ["2", "3", "4", "5"]  # the first is the caller's
        assert str(os.getpid()) not in {pid for pid, _ in built}
        assert not pools.build(MANY[1:], each_s=parallel_compile.WORTHWHILE_S)
        assert not pools.build([], each_s=parallel_compile.WORTHWHILE_S)
        assert len(list(tmp_path.iterdir())) == len(MANY) - 1  # nothing is built twice


@pytest.mark.skipif(not can_fork(), reason="needs fork, and files that are handed over")
def test_the_caller_waits_for_a_build_that_a_builder_is_at(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_compile, "FEWEST_CORES", 1)
    monkeypatch.setattr(parallel_compile, "FEWEST_BUILDS", 1)
    monkeypatch.setenv("CONVOY_TEST_BUILDS", str(tmp_path))
    with ParallelCompile(CUDA, SETTINGS) as pools:
        pools.begin(WANTED[:1])
        pool = pools._pools[0]
        with pool._changed:
            assert pool._changed.wait_for(lambda: pool._started or not pool._pending, timeout=60)
        assert not pools.build(WANTED, each_s=0.0)
        assert [path.name.split("-")[1] for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.skipif(not can_fork(), reason="needs fork, and files that are handed over")
def test_builds_that_need_the_gpu_begin_as_well(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOY_TEST_BUILDS", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(parallel_compile, "FEWEST_CORES", 1)
    monkeypatch.setattr(builders, "usable_cores", lambda: 3)
    monkeypatch.setattr(parallel_compile, "INDUCTOR", ("no.such.module", "colorsys"))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    settings = replace(SETTINGS, engines=engines.extra(engines.DeviceBuilder, engines.Builder))
    on_device = [(PROBLEM, replace(config, engine="device-builder")) for _, config in MANY]
    with ParallelCompile(replace(CUDA, memory_bytes=1 << 40), settings) as pools:  # with memory for two contexts
        pools.begin([*on_device, *WANTED])  # too few of the others
        pools._pools[1].wait(Request(PROBLEM, tuple(config for _, config in on_device), 1))
        built = [path.name.split("-") for path in tmp_path.iterdir()]
        assert sorted(tile for _, tile, _ in built) == ["1", "2", "3", "4", "5"]
        assert {seen for *_, seen in built} == {"5,7"}
        hidden, visible = pools._pools
        assert not hidden._threads
        assert visible._server is not None  # which sees no GPU, and whose workers do
        pools.build(on_device[:2], each_s=0.0)
        workers = list(visible._workers.values())
        assert any(worker._process.poll() is None for worker in workers)
        pools.build(on_device[:1], each_s=0.0)  # the caller's last
        for worker in workers:
            worker._process.wait(20.0)
    assert "colorsys" in sys.modules  # as PyTorch's compiler is, which the caller needs next


@pytest.mark.parametrize(
    ("target", "settings", "cores", "wanted"),
    [
        (CUDA, SETTINGS, 16, WANTED),
        (CUDA, SETTINGS, 2, MANY),
        (CUDA, replace(SETTINGS, isolate=False), 16, MANY),
        (detect_target("cpu"), SETTINGS, 16, MANY),
    ],
    ids=["soon done here", "two cores", "no further processes allowed", "cpu"],
)
def test_nothing_begins_where_it_would_not_help(monkeypatch, target, settings, cores, wanted):
    monkeypatch.setattr(parallel_compile, "usable_cores", lambda: cores)
    with ParallelCompile(target, settings) as pools:
        pools.begin(wanted)
        assert not any(pool._threads for pool in pools._pools)


def test_an_engine_that_compiles_counts_whatever_lies_between(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(parallel_compile.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(parallel_compile, "builder_pools", lambda *_: [])
    compiled, library = EngineConfig("builder", 1), EngineConfig("aten")
    rest = [(PROBLEM, config) for config in (compiled, library, library, compiled, *(library,) * 40, *(compiled,) * 5)]
    took = {"builder": parallel_compile.WORTHWHILE_S / 5, "aten": 0.01}
    asked = []
    with ParallelCompile(CUDA, SETTINGS) as pools:
        for done in range(len(rest)):
            asked.append(pools.build(rest[done:], each_s=took["aten"]))
            if asked[-1]:
                break
            now[0] += took[rest[done][1].engine]
    # The first build of an engine says nothing: it may import its compiler. After the second, five are left.
    assert asked == [False] * 4 + [True]
