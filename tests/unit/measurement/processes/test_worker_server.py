"""Workers that a server forks: as those that start by themselves, but everything is imported already."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from convoy.engines.manifest import load_engine
from convoy.engines.triton.triton_build import installed
from convoy.measurement import detect_target
from convoy.measurement.processes import builder_servers, worker_fork
from convoy.measurement.processes.builders import BuilderPool
from convoy.measurement.processes.process import WorkerEndedError, WorkerProcess
from convoy.measurement.processes.worker_server import WorkerServer, can_fork
from convoy.measurement.runner import Request
from convoy.problem import EngineConfig, Epilogue, Knobs, LinearProblem
from convoy.target import Target
from tests.unit.engines import norm_cases
from tests.unit.measurement import faulty_engines as engines

pytestmark = pytest.mark.skipif(not can_fork(), reason="needs fork, and files that are handed over")

PROBLEM = LinearProblem(2, 8, 4, epilogue=Epilogue(bias=True))
ENTRIES = engines.extra(engines.Builder)
H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20)
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

WORKER = """
import json, os, sys, threading

def main():
    imported = [name for name in ("torch", "convoy.engines.cpu.cpu_direct") if name in sys.modules]
    hello = json.loads(sys.stdin.readline())
    if hello.get("fault"):
        raise ValueError(hello["fault"])
    tasks = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 1
    said = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "imported": imported, "tasks": tasks}
    print(json.dumps({**said, "word": os.environ.get("CONVOY_TEST_WORD"), "hidden": os.environ["CUDA_VISIBLE_DEVICES"]}))
    sys.stdout.flush()
    for line in sys.stdin:
        print(json.dumps({"answer": json.loads(line)}), flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[WorkerServer]:
    made = WorkerServer(ENVIRONMENT)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forked_worker.py").write_text(WORKER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def worker_of(server: WorkerServer, word: str = "a", **hello: str) -> WorkerProcess:
    return WorkerProcess(hello, {**ENVIRONMENT, "CONVOY_TEST_WORD": word}, "forked_worker", start=server.fork)


def test_workers_have_all_imported_and_are_on_their_own(server: WorkerServer):
    first, second = worker_of(server), worker_of(server, "b")
    said = [worker.receive(60) for worker in (first, second)]
    assert [each["word"] for each in said] == ["a", "b"]
    assert {each["hidden"] for each in said} == {""}
    assert [each["imported"] for each in said] == [["torch", "convoy.engines.cpu.cpu_direct"]] * 2
    assert {each["parent"] for each in said} == {server._process.pid}
    assert [each["pid"] for each in said] == [each["group"] for each in said] == [first.pid, second.pid]
    second.send([1, 2])
    assert second.receive(60) == {"answer": [1, 2]}
    first.end()
    second.send("still here")
    assert second.receive(60) == {"answer": "still here"}
    second.end()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_the_server_has_one_thread_when_it_forks(server: WorkerServer):
    worker = worker_of(server)
    assert worker.receive(60)["tasks"] == 1
    assert len(list(Path(f"/proc/{server._process.pid}/task").iterdir())) == 1
    worker.end()


def test_a_worker_refuses_a_gpu_that_was_opened_before_the_fork(monkeypatch: pytest.MonkeyPatch):
    worker_fork.check_gpu_unopened({})
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    worker_fork.check_gpu_unopened({"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(RuntimeError, match="has opened the GPU"):
        worker_fork.check_gpu_unopened({"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize("asks_nvml", [True, False])
def test_the_servers_modules_may_ask_for_a_gpu_and_open_none(monkeypatch: pytest.MonkeyPatch, asks_nvml: bool):
    started: list[dict[str, str]] = []
    monkeypatch.setattr(builder_servers, "WorkerServer", lambda environment, modules: started.append(environment))
    builder_servers.BuilderServers().start()
    assert len(started) == 2
    opened: list[bool] = []

    def opens() -> int:  # as the driver's: it sees no device, and yet no fork may use one afterwards
        opened.append(True)
        return 0

    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", opens, raising=False)
    for environment in started:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if not asks_nvml:
            monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
        assert not torch.cuda.is_available()
    assert len(opened) == (0 if asks_nvml else 2)


def test_a_worker_that_fails_says_how(server: WorkerServer):
    worker = worker_of(server, fault="no such thing")
    with pytest.raises(WorkerEndedError, match=r"exit code 1\n(.|\n)*ValueError: no such thing") as error:
        worker.receive(60)
    assert not error.value.killed
    worker.end()
    worker = worker_of(server)
    os.kill(worker.receive(60)["pid"], signal.SIGKILL)
    with pytest.raises(WorkerEndedError, match="SIGKILL") as error:
        worker.receive(60)
    assert error.value.killed
    worker.end()


def test_workers_end_with_their_input_and_their_server(server: WorkerServer):
    own = WorkerServer(ENVIRONMENT)
    worker = worker_of(own)
    worker.receive(60)
    own.close()
    with pytest.raises(WorkerEndedError, match="the server of workers"):
        worker_of(own)
    worker.kill()
    with pytest.raises(WorkerEndedError, match="SIGKILL"):  # its output is closed
        worker.receive(60)
    worker.end()
    worker = worker_of(server)
    worker.receive(60)
    worker._process.stdin.close()  # type: ignore[union-attr]
    assert worker._process.wait(60) == 0


def request(*tiles: int) -> Request:
    return Request(PROBLEM, tuple(EngineConfig("builder", 1, Knobs.of(tile=tile)) for tile in tiles), 3)


def built(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[1] for path in folder.iterdir())


@pytest.mark.parametrize("fault", ["none", "server"])
def test_a_pool_builds_all_whatever_happens_to_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    folder = tmp_path / "built"
    folder.mkdir()
    monkeypatch.setenv("CONVOY_TEST_BUILDS", str(folder))
    pool = BuilderPool(detect_target("cpu"), ENTRIES, timeout_s=60.0, most=2)
    tiles = (1, 2, 3, 4, 5, 6)
    try:
        pool.submit([request(*tiles)])
        assert pool._server is not None
        if fault == "server":
            pool._server._process.kill()
        pool.wait(request(*tiles))
        assert built(folder) == [str(tile) for tile in tiles]
    finally:
        pool.close()
    assert pool._server._process.poll() is not None


def test_a_pool_that_is_closed_while_the_server_imports_leaves_no_process():
    pool = BuilderPool(detect_target("cpu"), ENTRIES, timeout_s=60.0, most=2)
    pool.submit([request(*range(1, 9))])
    start = time.monotonic()
    pool.close()
    assert pool._server is not None
    assert pool._server._process.poll() is not None
    assert not any(thread.is_alive() for thread in pool._threads)
    assert not pool._workers
    assert time.monotonic() - start < 60


@pytest.mark.skipif(not installed() or sys.platform != "linux", reason="needs Triton")
def test_kernels_of_forked_builders_are_found_in_tritons_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    engine = load_engine("triton.batch_norm")
    problem = norm_cases.forward(next(iter(norm_cases.CASES)), "bf16")
    configs = tuple(engine.config(knobs) for knobs in engine.space(problem, H100)[:5])
    wanted = Request(problem, configs, 1)
    pool = BuilderPool(H100, (), timeout_s=60.0, most=2)
    try:
        pool.submit([wanted])
        pool.wait(wanted)
    finally:
        pool.close()
    kernels = set((tmp_path / "triton").iterdir())
    assert len(kernels) >= len(configs)
    for config in configs:
        engine.build(problem, config.knobs, H100)
    assert set((tmp_path / "triton").iterdir()) == kernels, json.dumps(sorted(map(str, kernels)))
