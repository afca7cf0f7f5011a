"""A net with branches on several streams: the same bits as on one, replay after replay, with the memory under pressure."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch import nn

import convoy
from convoy.perfdb import Database
from convoy.pipeline.measure_net import measure
from convoy.pipeline.net import capture_net
from convoy.pipeline.plan_target import target_for
from convoy.pipeline.schedules import build_fastest
from convoy.pipeline.select import make_plan, select
from convoy.program import build_program
from convoy.program.occupancy import device_shares
from convoy.schedule import CapacityModel, parallel_steps
from convoy.tune import local_search

pytestmark = pytest.mark.gpu


class Branches(nn.Module):
    """Four inception blocks: branches of 1x1, 3x3, 5x5 and pooling, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        for block in range(4):
            self.add_module(f"a{block}", nn.Conv2d(128, 32, 1))
            self.add_module(
                f"b{block}", nn.Sequential(nn.Conv2d(128, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
            )
            self.add_module(
                f"c{block}", nn.Sequential(nn.Conv2d(128, 16, 1), nn.ReLU(), nn.Conv2d(16, 32, 5, padding=2))
            )
            self.add_module(f"d{block}", nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(128, 32, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in range(4):
            x = torch.relu(torch.cat([self.get_submodule(f"{part}{block}")(x) for part in "abcd"], 1))
        return x


@pytest.fixture(scope="module", params=[torch.float16, torch.float32])
def serial(request, tmp_path_factory):
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_search, "QUICK_COMPILED_CONFIGS", 0)  # one setting of each engine: a compiler's second each
        yield _tuned(request, tmp_path_factory)


def _tuned(request, tmp_path_factory):
    model = Branches().eval().to("cuda", request.param)
    x = torch.randn(2, 128, 28, 28, device="cuda", dtype=request.param)
    few = ("triton.implicit_gemm", "triton.pointwise")
    settings = convoy.Settings(db=tmp_path_factory.mktemp("db") / "perf.db", isolate=False, only_engines=few)
    net = capture_net("branches", model, (x,), {}, settings, target_for("cuda"))
    with Database.open(settings.db) as database:
        found = measure(net, settings, database, lambda *_: None)
    plan = make_plan(net, select(net, found, settings), settings)
    return net, settings, plan, x


def program_of(serial, streams):
    net, settings, plan, _ = serial
    spread = dataclasses.replace(plan, steps=parallel_steps(plan.steps, streams))
    assert {step.stream for step in spread.steps} == set(range(streams))
    return build_program(spread, net.captured, net.regions_by_nodes, net.target, settings)


def test_what_steps_take_of_the_device_is_seen(serial):
    program = program_of(serial, 1).runnable
    found = device_shares(program.eager, program.inputs)
    assert len(found) == len(program.bound.steps)
    assert all(0 <= share <= 1 for share in found)
    convolutions = [
        share for share, bound in zip(found, program.bound.steps, strict=True) if bound.step.pattern == "conv"
    ]
    assert convolutions
    assert all(convolutions)  # a convolution launches kernels


def test_schedules_by_the_clock_say_what_was_measured_and_the_bounds(serial):
    net, settings, plan, x = serial
    chosen, program = build_fastest(plan, net, dataclasses.replace(settings, stream_memory=4.0))
    (note,) = [line for line in chosen.notes if line.startswith("streams:") and "measured" in line]
    assert "the critical path alone" in note
    assert "all work on a full device" in note
    alone = program_of(serial, 1)
    assert torch.equal(program((x,), {}), alone((x,), {}))


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_admitted_schedules_give_the_same_bits(serial, streams):
    net, settings, plan, x = serial
    alone = program_of(serial, 1)
    taken = device_shares(alone.runnable.eager, alone.runnable.inputs)
    steps = parallel_steps(plan.steps, streams, taken, CapacityModel())
    spread = dataclasses.replace(plan, steps=steps)
    several = build_program(spread, net.captured, net.regions_by_nodes, net.target, settings)
    wanted = alone((x,), {})
    for _ in range(200):
        assert torch.equal(several((x,), {}), wanted)


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_the_same_bits_on_several_streams(serial, streams):
    alone, several = program_of(serial, 1), program_of(serial, streams)
    x = serial[3]
    inputs = [torch.randn(x.shape, generator=torch.Generator().manual_seed(s)).to(x) for s in range(4)]
    wanted = [alone((given,), {}) for given in inputs]
    stop = threading.Event()

    def press() -> None:
        """Other work that allocates, writes and frees all the time, on a stream of its own."""
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                torch.full((1 << 22,), float("nan"), device="cuda")
                torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        for index in range(2000):
            found = several((inputs[index % 4],), {})
            if index % 37 == 0:
                assert torch.equal(found, wanted[index % 4])
        assert torch.equal(several((inputs[0],), {}), wanted[0])
    finally:
        stop.set()
        thread.join()
