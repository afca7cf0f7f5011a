"""A net whose capture fails: it is launched step by step, says why, and leaves the process as it was. On a CPU, planted."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy import plan as plans
from convoy.engines.base import Buffers
from convoy.errors import LaunchError
from convoy.measurement import capture_recovery
from convoy.measurement.timer import captured
from convoy.pipeline import schedules
from convoy.pipeline.check import end_to_end, stock_graph
from convoy.pipeline.check.net_check import NetCheck
from convoy.pipeline.isolation import isolate
from convoy.pipeline.replay import program_of_plan
from convoy.plan import Plan, Step
from convoy.problem import EngineConfig, Knobs, TensorSpec
from convoy.program import CudaGraphProgram, Program, build_program, runnable_program, step_timeline
from convoy.program.bound_plan import BoundPlan, BoundStep
from convoy.program.cuda import recording
from convoy.program.cuda.last_work import LastWork
from convoy.program.runnable_program import eager_of
from convoy.program.shared_memory import SharedMemory, sharing
from convoy.training import training_job
from tests.unit.program.fake_cuda import CPU, ENDED, REFUSED, FakeCuda, FakeStream, install

X = torch.tensor([1.0, 2.0, 3.0])
SPEC = TensorSpec((3,), "fp32")
NOTE = f"the launches could not be captured as a CUDA graph and run one by one: {REFUSED}"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


class Adds:
    """Adds one; fails where it is told to."""

    workspace_bytes = 0
    allocates_results = False

    def __init__(self, cuda: FakeCuda, error: Exception | None = None, *, always: bool = False) -> None:
        self.launches, self._cuda, self._error, self._always = 0, cuda, error, always

    def launch(self, buffers: Buffers, workspace: object) -> None:
        if self._error is not None and (self._always or self._cuda.recording):
            raise self._error
        self.launches += 1
        torch.add(buffers.args[0], 1, out=buffers.results[0])


def bound(*executables: Adds) -> BoundPlan:
    """A chain of them."""
    names = [f"v{index}" for index in range(len(executables) + 1)]
    steps = [
        BoundStep(
            Step("region", "op", (after,), (before,), (after,), "p", EngineConfig("aten", 1, Knobs()), "any"),
            executable,  # type: ignore[arg-type]
            (),
            (at,),
            (at + 1,),
            (SPEC,),
        )
        for at, (executable, before, after) in enumerate(zip(executables, names, names[1:], strict=False))
    ]
    return BoundPlan(steps, names, [(SPEC, "any")], [len(executables)], 0, 0)


def graph_of(*executables: Adds, static_outputs: bool = False) -> CudaGraphProgram:
    return CudaGraphProgram(bound(*executables), CPU, static_outputs=static_outputs)


def test_a_call_runs_on_its_own_device_and_on_the_present_stream(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    program = graph_of(Adds(cuda))
    entered: list[int] = []
    device = torch.cuda.device
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or device(index))
    used: list[object] = []
    monkeypatch.setattr(type(program._last_work._event), "record", lambda self, stream: used.append(stream))
    program([X])
    assert not entered
    first, cuda.current = cuda.current, FakeStream()
    for _ in range(2):
        program([X])
    assert used == [first, cuda.current, cuda.current]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    program([X])
    assert entered == [0]


@pytest.mark.parametrize(
    ("identifier", "waits"),
    [(0, False), (33, False), (0x7F00, True)],
    ids=["default", "torch's own", "another library's"],
)
def test_a_stream_waits_only_for_work_of_others(cuda: FakeCuda, identifier: int, waits: bool):
    waited: list[str] = []

    class Stream(FakeStream):
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: object) -> None:
            waited.append(self.name)

    work, mine, other = LastWork(), Stream("mine"), Stream("other")
    work.precede(mine, (identifier, 0, 1))  # type: ignore[arg-type]
    work.record(mine, (identifier, 0, 1))  # type: ignore[arg-type]
    waited.clear()
    work.precede(mine, (identifier, 0, 1))  # type: ignore[arg-type]
    assert waited == ["mine"] * waits
    waited.clear()
    work.precede(other, (65, 0, 1))  # type: ignore[arg-type]
    work.record(other, (65, 0, 1))  # type: ignore[arg-type]
    work.precede(mine, (identifier, 0, 1))  # type: ignore[arg-type]
    assert waited == ["other", "mine"]


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_during_a_capture(cuda: FakeCuda, fails: bool):
    """The collector may find an older graph, and destroying that invalidates the capture."""

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            destroyed_while.append(cuda.recording)

    class Collects(Adds):
        def launch(self, buffers: Buffers, workspace: object) -> None:
            for _ in range(3000):
                Garbage()
            super().launch(buffers, workspace)

    destroyed_while: list[bool] = []
    graph_of(Collects(cuda, RuntimeError(REFUSED) if fails else None))
    assert gc.isenabled()
    gc.collect()
    assert destroyed_while
    assert not any(destroyed_while)


def test_what_can_be_captured_is_replayed(cuda: FakeCuda):
    adds = Adds(cuda)
    program = graph_of(adds)
    launches = adds.launches
    program([X])
    program.replay()
    assert (program.refused, program.eager.recordable) == ("", True)
    assert (cuda.begun, cuda.replays, adds.launches) == (1, 2, launches)


@pytest.mark.parametrize("static_outputs", [False, True])
@pytest.mark.parametrize("invalid", [True, False])
@pytest.mark.parametrize("error", [RuntimeError(f"{REFUSED}\nand more"), LaunchError(REFUSED)])
def test_what_cannot_be_captured_is_launched_and_says_why(
    cuda: FakeCuda, error: Exception, invalid: bool, static_outputs: bool
):
    cuda.invalid, caller = invalid, cuda.current
    first, second = Adds(cuda), Adds(cuda, error)
    program = graph_of(first, second, static_outputs=static_outputs)
    assert program.refused == REFUSED  # and not how the recording ended
    assert not program.eager.recordable
    launches = second.launches
    (kept,) = program([X])
    (other,) = program([X + 10])
    assert kept.tolist() == [3.0, 4.0, 5.0]
    assert other.tolist() == [13.0, 14.0, 15.0]
    program.replay()
    assert (second.launches - launches, cuda.replays) == (3, 0)
    assert cuda.current is caller
    cuda.draw()


@pytest.mark.parametrize("invalid", [True, False])
def test_no_room_and_launches_that_fail_anyway_are_not_taken_for_a_failed_capture(cuda: FakeCuda, invalid: bool):
    cuda.invalid = invalid
    for error in (torch.OutOfMemoryError("full"), ValueError("a slip of ours")):
        with pytest.raises(type(error), match=str(error)):
            graph_of(Adds(cuda, error))
    with pytest.raises(RuntimeError, match="planted"):
        graph_of(Adds(cuda, RuntimeError("planted"), always=True))


@pytest.mark.parametrize("invalid", [True, False])
def test_a_failed_recording_leaves_stream_and_generator_usable(cuda: FakeCuda, invalid: bool):
    cuda.invalid, caller, kept = invalid, cuda.current, len(capture_recovery._UNFINISHED)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=f"^{REFUSED}$"), recording.recording(graph, torch.cuda.Stream()):
        raise RuntimeError(REFUSED)
    assert cuda.current is caller
    cuda.draw()
    # One that was never ended is asked by PyTorch's allocator ever after; of the others none is kept, and its memory goes back.
    assert len(capture_recovery._UNFINISHED) - kept == invalid


def test_no_recording_begins_without_room_for_its_random_numbers(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    """PyTorch ends the process there, as it frees the graph."""

    def full(*size: object, **words: object) -> None:
        raise torch.OutOfMemoryError("full")

    caller = cuda.current
    monkeypatch.setattr(torch, "empty", full)
    with (
        pytest.raises(torch.OutOfMemoryError, match="full"),
        recording.recording(torch.cuda.CUDAGraph(), torch.cuda.Stream()),
    ):
        pytest.fail("it was begun")
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        captured(lambda: None, 3)
    assert cuda.begun == 0
    assert cuda.current is caller


def test_a_recording_that_cannot_be_ended_says_so_itself(cuda: FakeCuda):
    cuda.spoiled = True
    program = graph_of(Adds(cuda))
    assert program.refused == f"CUDA error: {ENDED}"
    assert program([X])[0].tolist() == [2.0, 3.0, 4.0]
    cuda.draw()


def test_words_of_errors_that_have_none():
    assert recording.first_line(RuntimeError()) == "RuntimeError"
    assert recording.first_line(RuntimeError("one\ntwo")) == "one"


def test_a_timeline_of_what_cannot_be_captured_is_taken_launch_by_launch(cuda: FakeCuda):
    program = graph_of(Adds(cuda), Adds(cuda, RuntimeError(REFUSED)))
    begun = cuda.begun
    rounds = step_timeline._on_gpu(program.eager, [X], step_timeline.ROUNDS, 1)
    assert (cuda.begun, cuda.replays) == (begun, 0)
    assert [len(marks) for marks in rounds] == [2] * step_timeline.ROUNDS
    taken = [marks[1][1] for marks in rounds]
    assert taken == sorted(set(taken))  # each round marked anew


class Net(nn.Module):
    """A layer that cannot be captured while `refuses`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.cuda_state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cuda_state is not None and self.cuda_state.recording:
            raise RuntimeError(REFUSED)
        return torch.relu(self.fc(x))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    folder = tmp_path_factory.mktemp("graph")
    return convoy.Settings(
        isolate=False, solver="baseline", only_engines=("aten",), effort=convoy.Effort.NONE, db=folder / "perf.db"
    )


@pytest.fixture(scope="module")
def saved(settings: convoy.Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the net."""
    path = tmp_path_factory.mktemp("plan") / "net.plan.json"
    convoy.optimize(Net(), torch.zeros(4, 3), settings=settings).save(path)
    return path


@pytest.fixture
def refusing(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A machine whose target is a GPU, on which the last launch of a net cannot be captured: the CPU's engines, told so."""
    detected, bind = program_of_plan.target_for, runnable_program.bind

    def on_cpu(plan: Plan, captured: Any, regions: Any, target: Any, *others: Any, **words: Any) -> BoundPlan:
        made = bind(plan, captured, regions, detected("cpu"), *others, **words)
        inner = made.steps[-1].executable

        def launch(buffers: Buffers, workspace: Any) -> None:
            if cuda.recording:
                raise RuntimeError(f"{REFUSED}\nand more")
            inner.launch(buffers, workspace)

        refuses = SimpleNamespace(
            launch=launch, workspace_bytes=inner.workspace_bytes, allocates_results=inner.allocates_results
        )
        last = dataclasses.replace(made.steps[-1], executable=refuses)  # type: ignore[arg-type]
        return dataclasses.replace(made, steps=(*made.steps[:-1], last))

    class OnCpu(CudaGraphProgram):
        def __init__(self, bound: BoundPlan, device: torch.device, **words: Any) -> None:
            assert device.type == "cuda"
            super().__init__(bound, CPU, **words)

    def as_gpu(device: str) -> Any:
        return dataclasses.replace(detected(device), device="cuda")

    monkeypatch.setattr(runnable_program, "bind", on_cpu)
    monkeypatch.setattr(runnable_program, "CudaGraphProgram", OnCpu)
    monkeypatch.setattr(program_of_plan, "target_for", as_gpu)
    monkeypatch.setattr(program_of_plan, "check_target", lambda plan, target: None)
    return cuda


def test_a_loaded_plan_that_cannot_be_captured_runs_and_has_a_note(refusing: FakeCuda, saved: Path, tmp_path: Path):
    net, x = Net(), torch.randn(4, 3)
    program = convoy.load(net, saved, (x,))
    assert program.plan.notes[-1] == NOTE
    assert NOTE in program.explain()
    assert torch.allclose(program(x), net(x))
    assert refusing.replays == 0
    again = convoy.load(net, program.save(tmp_path / "again.json")[0], (x,))
    assert again.plan.notes.count(NOTE) == 1


def test_a_net_that_cannot_be_captured_is_checked_against_pytorchs_launches(
    refusing: FakeCuda, saved: Path, settings: convoy.Settings, monkeypatch: pytest.MonkeyPatch
):
    model, x = Net().eval(), torch.randn(4, 3)
    model.cuda_state = refusing
    target = program_of_plan.target_for("cpu")
    isolated = isolate(model, (x,), {})
    isolated.model.cuda_state = refusing
    net = program_of_plan.captured_net("net", isolated, settings, target)
    plan, program = schedules.build_fastest(plans.load(saved), net, dataclasses.replace(settings, streams=1))
    assert plan.notes[-1] == NOTE
    monkeypatch.setattr(end_to_end, "LEAST_ROUND_S", 1e-4)
    monkeypatch.setattr(stock_graph, "capture_stock", capture_on_cpu)
    outcome = NetCheck(net, isolated).both(program)
    assert outcome is not None
    assert (outcome.baseline.name, outcome.optimized.name) == ("torch.eager", "convoy")
    assert outcome.errors.rel_l2_error < 1e-6
    isolated.model.cuda_state = None
    outcome = NetCheck(net, isolated).both(program)
    assert outcome is not None
    assert outcome.baseline.name == "torch.graph"


def capture_on_cpu(run: Any, *, reads: object) -> Any:
    graph = torch.cuda.CUDAGraph()
    with recording.recording(graph, torch.cuda.Stream()):
        run()
    return graph.replay


def test_pytorch_itself_may_be_short_of_room_which_is_no_failed_capture():
    def full() -> Any:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        stock_graph.baseline_run(lambda: None, full)


def test_a_replayed_training_plan_tells_of_it_in_the_steps_notes(
    settings: convoy.Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = Net()
    given = (
        model,
        nn.functional.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(4, 3), torch.arange(4) % 2),
    )
    path = convoy.training_step(*given, settings=settings).save(tmp_path / "step.json")

    def refused(plan: Plan, *others: Any) -> Program:
        made = build_program(plan, *others)
        return Program(dataclasses.replace(plan, notes=(*plan.notes, NOTE)), made.captured, made.runnable)

    monkeypatch.setattr(training_job, "build_program", refused)
    step = convoy.training_step(*given, plan=path, settings=settings)
    assert eager_of(step.program.runnable).recordable  # type: ignore[arg-type]
    assert step.notes[-1] == NOTE


def test_programs_of_one_memory_run_one_at_a_time_in_one_pool_and_one_set_of_input_buffers(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    pools: list[object] = []
    plain = recording.recording

    def spy(graph, stream, pool=None):
        pools.append(pool)
        return plain(graph, stream, pool)

    monkeypatch.setattr("convoy.program.cuda.cuda_graph.recording", spy)
    memory = SharedMemory()
    with sharing(memory):
        one, other = graph_of(Adds(cuda)), graph_of(Adds(cuda), Adds(cuda))
    alone = graph_of(Adds(cuda))
    assert one._lock is other._lock is memory.lock
    assert one._last_work is other._last_work
    assert pools[0] == pools[1] is not None
    assert pools[2] is None
    assert one.inputs[0].data_ptr() == other.inputs[0].data_ptr() != alone.inputs[0].data_ptr()
    assert alone._lock is not memory.lock
