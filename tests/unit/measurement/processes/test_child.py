"""The worker process. Starting one costs seconds, so each test puts many questions to few workers."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from convoy.engines.manifest import load_engine
from convoy.errors import LaunchError
from convoy.measurement import detect_target
from convoy.measurement.device.memory_limit import CONTEXT_BYTES, SPARE_BYTES
from convoy.measurement.processes.child import ChildRunner
from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request, measurement_row
from convoy.perfdb.record import to_record
from convoy.perfdb.row import Status
from convoy.problem import EngineConfig, Epilogue, LinearProblem, SubgraphProblem
from convoy.target import Target
from tests.unit.measurement import faulty_engines as engines

CPU = detect_target("cpu")
PROTOCOL = Protocol("wall", min_sample_us=50, few=3, rounds=5)
PROBLEM = LinearProblem(2, 8, 4, epilogue=Epilogue(bias=True))
TEXT = "graph 1\ninput %x: fp32[2,3,4,4]\n%y: fp32[2,3,4,4] = aten.relu.default(%x)\nreturn %y\n"


def request(*classes, problem=PROBLEM, rounds=3):
    return Request(problem, tuple(EngineConfig(cls.id) for cls in classes), rounds)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_crashes_and_hangs_cost_a_row_each_and_the_rest_goes_on():
    classes = (
        engines.Right, engines.Exit, engines.Chatty, engines.Segfault, engines.Hang, engines.Wrong, engines.HangWhenTimed,
        engines.NoCompiler,
    )  # fmt: skip
    runner = ChildRunner(detect_target("cpu"), extra_engines=engines.extra(*classes), timeout_s=4.0)
    try:
        rows = {row.config.engine: row for row in runner.measure(request(*classes), PROTOCOL)}
        assert {engine: str(row.status) for engine, row in rows.items()} == {
            "right": "ok", "exit": "launch_error", "chatty": "ok", "segfault": "launch_error", "hang": "timeout",
            "wrong": "wrong_result", "hang_when_timed": "timeout", "no_compiler": "compile_error",
        }  # fmt: skip
        assert "exit code 5" in rows["exit"].reason
        assert "SIGSEGV" in rows["segfault"].reason
        assert "in body" in rows["segfault"].reason  # faulthandler names the line that did it
        assert rows["hang"].reason == "it took longer than 4 s"
        # Two for each crash (the second alone, to be sure), one for each hang, one at first.
        assert runner.starts <= 7

        # A piece of the graph travels by its text, and the worker stays for the next request.
        starts, worker = runner.starts, runner._worker
        [row] = runner.measure(Request(SubgraphProblem(TEXT), (load_engine("aten").config(),), 2), PROTOCOL)
        assert row.ok
        assert (runner.starts, runner._worker) == (starts, worker)
    finally:
        runner.close()


def test_the_blame_needs_a_second_look_and_leaving_early_leaves_nothing_behind():
    classes = (engines.Spoiler, engines.CrashInCompany, engines.Slow, engines.Right)
    runner = ChildRunner(detect_target("cpu"), extra_engines=engines.extra(*classes), timeout_s=20.0)
    try:
        rows = {row.config.engine: row for row in runner.measure(request(*classes[:2]), PROTOCOL)}
        assert all(row.ok for row in rows.values())
        assert runner.starts == 2

        first = runner._worker.pid
        found = runner.measure(request(engines.Right, engines.Slow), PROTOCOL)
        next(found)
        found.close()
        assert not is_running(first)
        assert runner._worker is None
        [row] = runner.measure(request(engines.Right), PROTOCOL)
        assert row.ok
        second = runner._worker.pid
        assert second != first
    finally:
        runner.close()
        runner.close()
    assert not is_running(second)
    assert not Path(f"/proc/{second}").exists()  # waited for: no zombie


def test_a_worker_that_is_killed_from_outside_is_replaced():
    runner = ChildRunner(detect_target("cpu"), extra_engines=engines.extra(engines.Right), timeout_s=20.0)
    try:
        assert [row.ok for row in runner.measure(request(engines.Right), PROTOCOL)] == [True]
        os.kill(runner._worker.pid, signal.SIGKILL)
        assert [row.ok for row in runner.measure(request(engines.Right), PROTOCOL)] == [True]
        assert runner.starts == 2
    finally:
        runner.close()


def test_the_worker_runs_as_its_parent_does():
    """Threads and precision are the parent's."""
    seen = {}

    class Probe(ChildRunner):
        def _started(self):
            worker = super()._started()
            seen["environment"] = Path(f"/proc/{worker.pid}/environ").read_text().split("\0")
            return worker

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner = Probe(detect_target("cpu"), extra_engines=(f"threads={__name__}:Threads",), timeout_s=20.0)
        try:
            config = EngineConfig("threads")
            [row] = runner.measure(Request(PROBLEM, (config,), 2), PROTOCOL)
        finally:
            runner.close()
    finally:
        torch.set_num_threads(before)
    assert row.reason == "the compiler said 2 medium bf16"
    assert "OMP_NUM_THREADS=2" in seen["environment"]


def test_the_context_of_the_worker_comes_out_of_the_limit(monkeypatch):
    """The worker is told how much its tensors may take."""
    told = []

    class Told:
        def __init__(self, hello, environment):
            told.append(hello["memory_limit"])
            raise LaunchError("not started")

    monkeypatch.setattr("convoy.measurement.processes.child.WorkerProcess", Told)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (70 << 30, 80 << 30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 1 << 30)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("convoy.measurement.device.memory_limit.own_bytes", lambda: None)
    cpu, gpu = detect_target("cpu"), Target("cuda", "test", "sm_90", 132, 80 << 30, 0)
    for target, limit in ((gpu, 3 << 30), (gpu, None), (cpu, 3 << 30)):
        runner = ChildRunner(target, memory_bytes=limit)
        with pytest.raises(LaunchError, match="not started"):
            next(runner.measure(request(engines.Right), PROTOCOL))
    room = {"tensors": (3 << 30) - SPARE_BYTES - CONTEXT_BYTES, "context": None, "others": (10 << 30) + CONTEXT_BYTES}
    assert told == [room, None, None], "a CPU's memory is not limited"


@pytest.mark.parametrize(
    ("gone", "starts"),
    [
        ([0.0, 0.1, 0.19, 0.1], 1),
        ([0.3, 0.4, 0.49, 0.3], 1),  # what it takes from the beginning, a fresh one takes too
        ([0.1, 0.31, 0.1, 0.2], 2),
        ([0.0, 0.5, 0.0, 0.5], 2),
        ([0.0, 0.5, 0.5, 0.8, 0.0], 3),
    ],
)
def test_a_worker_that_has_lost_much_of_its_room_is_replaced(monkeypatch, gone, starts):
    said, ended = iter(gone), []

    class Losing:
        """Gives each request its row and says how much of its room is gone."""

        def __init__(self, hello, environment):
            self.messages = [{"ready": True}]

        def send(self, job):
            rows = [
                measurement_row(CPU, PROBLEM, EngineConfig(*fields[:2]), PROTOCOL, Status.TIMEOUT, reason="late")
                for fields in job["configs"]
            ]
            self.messages += [*({"row": to_record(row)} for row in rows), {"done": True, "gone": next(said)}]

        def receive(self, timeout_s):
            return self.messages.pop(0)

        def end(self):
            ended.append(self)

    monkeypatch.setattr("convoy.measurement.processes.child.WorkerProcess", Losing)
    runner = ChildRunner(CPU)
    for _ in gone:
        assert len(list(runner.measure(request(engines.Right), PROTOCOL))) == 1
    runner.close()
    assert runner.starts == starts
    assert len(ended) == len({*map(id, ended)}) == starts


class Threads(engines.Right):
    """Fails to build, and says how many threads torch has."""

    id = "threads"

    def build(self, problem, knobs, target):
        from convoy.errors import CompileError

        precision = f"{torch.get_float32_matmul_precision()} {torch.backends.mkldnn.conv.fp32_precision}"
        raise CompileError(self.id, f"the compiler said {torch.get_num_threads()} {precision}")


@pytest.fixture(autouse=True)
def _precision(request):
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.mkldnn.conv
    if request.function is test_the_worker_runs_as_its_parent_does:
        torch.set_float32_matmul_precision("medium")
        convolutions.fp32_precision = "bf16"
    yield
    torch.set_float32_matmul_precision(before)
    convolutions.fp32_precision = "none"


def test_a_worker_that_cannot_start_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("convoy.measurement.processes.process.BOOTSTRAP", "raise SystemExit('no torch here')")
    runner = ChildRunner(detect_target("cpu"))
    with pytest.raises(LaunchError, match=r"did not start: .*exit code 1\nno torch here"):
        list(runner.measure(request(engines.Right), PROTOCOL))
    assert runner._worker is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_the_worker_ends_with_its_parent_even_in_a_hanging_build(tmp_path):
    script = textwrap.dedent(
        """
        import sys, threading, time
        from tests.unit.measurement import faulty_engines as engines
        from tests.unit.measurement.processes.test_child import PROTOCOL, request
        from convoy.measurement import ChildRunner, detect_target

        runner = ChildRunner(detect_target("cpu"), extra_engines=engines.extra(engines.Hang), timeout_s=600.0)
        threading.Thread(target=lambda: list(runner.measure(request(engines.Hang), PROTOCOL)), daemon=True).start()
        while not runner.starts or runner._is_new or runner._worker is None:
            time.sleep(0.05)
        time.sleep(1)
        print(runner._worker.pid, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not is_running(worker))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
