"""The clock on a GPU: graph replay, a context that is lost, builders ahead of the clock."""

import statistics
import time

import pytest
import torch

from convoy.engines.base import Executable
from convoy.engines.library.aten import Aten
from convoy.engines.manifest import load_engine
from convoy.measurement import ChildRunner, InProcessRunner, Request, detect_target, floor_us, peaks
from convoy.measurement.processes.builder_servers import ONE_COMPILER, ONE_THREAD, BuilderServers
from convoy.measurement.processes.process import START_S, WorkerProcess, worker_handshake
from convoy.measurement.protocol import Protocol
from convoy.measurement.timer import time_rounds
from convoy.perfdb.row import Status
from convoy.problem import ConvProblem, EngineConfig, Epilogue

pytestmark = pytest.mark.gpu

PROTOCOL = Protocol("graph", min_sample_us=200, few=3, rounds=7)
PROBLEM = ConvProblem(
    1, 256, 14, 14, 256, 3, 3, 1, 1, layout="nhwc", x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16", numerics="half",
    epilogue=Epilogue(bias=True, activation="relu"),
)  # fmt: skip


class _Asserts(Executable):
    allocates_results = True

    def launch(self, buffers, workspace):
        table = torch.zeros(4, device="cuda")
        buffers.results[0] = table[torch.full((1,), 1 << 20, device="cuda")]


class LosesContext(Aten):
    """Reads outside a table: a device-side assertion, after which the context is of no use."""

    id = "loses_context"

    def build(self, problem, knobs, target):
        return _Asserts()


class NeedsHost(Aten):
    """Waits for the device in its launch: right, and impossible to capture."""

    id = "needs_host"

    def build(self, problem, knobs, target):
        inner = super().build(problem, knobs, target)

        class Waits(Executable):
            allocates_results = True

            def launch(self, buffers, workspace):
                inner.launch(buffers, workspace)
                torch.cuda.current_stream().synchronize()

        return Waits()


def test_the_gpu_is_described_and_its_ceilings_are_plausible():
    target = detect_target("cuda")
    assert target.capability >= 70
    for name in ("torch", "cuda", "cudnn", "driver"):
        assert target.version(name)
    found = peaks(target)
    assert found.bytes_per_s > 1e11
    assert found.flops["fp16"] > found.flops["fp32"] > 1e12
    assert 0 < floor_us(PROBLEM, found) < 100


@pytest.mark.parametrize("clock", ["graph", "events"])
def test_both_clocks_agree_on_a_long_kernel(clock):
    a = torch.randn(4096, 4096, device="cuda")
    out = torch.empty_like(a)
    small = torch.randn(64, device="cuda")
    protocol = Protocol(clock, min_sample_us=200)
    long, short = time_rounds([lambda: torch.mm(a, a, out=out), lambda: small.mul_(1.0)], protocol, 5, "cuda")
    assert len(long) == len(short) == 5
    assert min(long) > 20 * min(short) > 0
    if clock == "graph":
        assert min(short) < 10  # without the host's cost of a launch


def test_what_the_host_needs_for_a_launch_is_not_charged():
    small = torch.randn(64, device="cuda")

    def slowly():
        time.sleep(4e-4)
        small.mul_(1.0)

    protocol = Protocol("graph", min_sample_us=200)
    quick, slow = time_rounds([lambda: small.mul_(1.0), slowly], protocol, 7, "cuda")
    assert abs(statistics.median(slow) / statistics.median(quick) - 1) < 0.1


def test_candidates_are_timed_in_graphs():
    target = detect_target("cuda")
    configs = [load_engine("aten").config()]
    kernels = [load_engine(name) for name in ("triton.implicit_gemm", "triton.swapped")]
    configs += [e.config(e.space(PROBLEM, target)[0]) for e in kernels if e.supports(PROBLEM, target)]
    rows = list(InProcessRunner(target).measure(Request(PROBLEM, tuple(configs), 7), PROTOCOL))
    assert len(rows) == len(configs)
    for row in rows:
        assert row.ok, row.reason
        assert floor_us(PROBLEM, peaks(target)) < row.median_us < 1000


def test_a_lost_context_is_one_row_and_the_rest_goes_on():
    target = detect_target("cuda")
    entries = tuple(f"{cls.id}={__name__}:{cls.__name__}" for cls in (LosesContext, NeedsHost))
    aten = load_engine("aten")
    configs = (
        EngineConfig("loses_context", aten.version), aten.config(), EngineConfig("needs_host", aten.version),
    )  # fmt: skip
    runner = ChildRunner(target, extra_engines=entries, timeout_s=60.0)
    try:
        rows = {row.config.engine: row for row in runner.measure(Request(PROBLEM, configs, 5), PROTOCOL)}
    finally:
        runner.close()
    assert rows["loses_context"].status is Status.LAUNCH_ERROR
    assert rows["aten"].ok, rows["aten"].reason
    assert rows["needs_host"].status is Status.LAUNCH_ERROR
    assert runner.starts == 2


def test_builders_that_see_the_gpu_are_forked_with_inductor_imported():
    with BuilderServers() as servers:
        server = servers.take(on_device=True)
        try:
            hello = worker_handshake(detect_target("cuda"), (), 60.0, role="build")
            worker = WorkerProcess(hello, {**ONE_THREAD, **ONE_COMPILER}, start=server.fork)
            try:
                assert worker.receive(START_S) == {"ready": True}
            finally:
                worker.end()
        finally:
            server.close()


def test_builders_fill_the_cache_ahead_of_the_clock(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = detect_target("cuda")
    engine = load_engine("triton.implicit_gemm")
    if not engine.supports(PROBLEM, target):
        pytest.skip("the kernel does not run here")
    configs = tuple(engine.config(knobs) for knobs in list(engine.space(PROBLEM, target))[:6])
    request = Request(PROBLEM, configs, 3)
    runner = ChildRunner(target, timeout_s=60.0)
    try:
        runner.prepare([request])
        for pool in runner._builders:
            pool.wait(request)
        assert list(tmp_path.rglob("*.cubin"))
        assert len(list(runner.measure(request, PROTOCOL))) == len(configs)
    finally:
        runner.close()
