"""Recordings that cannot be ended, on a machine without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from convoy.measurement import capture_recovery
from convoy.measurement.failure import failure_of, is_out_of_memory
from convoy.measurement.timer import captured
from convoy.perfdb.row import Status
from convoy.program.cuda.recording import recording
from tests.unit.program.fake_cuda import ENDED, FakeCuda, install

Launch = Callable[[], object]
FULL = torch.OutOfMemoryError("CUDA out of memory.")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(capture_recovery, "_UNFINISHED", [])
    return install(monkeypatch)


def by_hand(launch: Launch) -> None:
    captured(launch, 2)


def as_programs_do(launch: Launch) -> None:
    with recording(torch.cuda.CUDAGraph(), torch.cuda.Stream()):
        launch()


WAYS = pytest.mark.parametrize("way", [by_hand, as_programs_do])


def refusing(cuda: FakeCuda, error: Exception = FULL) -> Launch:
    """A launch that fails where it is recorded."""

    def launch() -> None:
        if cuda.recording:
            raise error

    return launch


def pool_of(graph: torch.cuda.CUDAGraph) -> object:
    return graph._pool  # type: ignore[attr-defined] - the fake one's


@WAYS
@pytest.mark.parametrize("invalid", [True, False])
def test_a_failure_keeps_its_own_words_and_the_process_goes_on(
    cuda: FakeCuda, way: Callable[[Launch], None], invalid: bool
) -> None:
    cuda.invalid, caller = invalid, cuda.current
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            way(refusing(cuda))
        assert raised.value is FULL
        assert (
            raised.value.__cause__ is raised.value.__context__ is None
        )  # their frames would hold what the launch took
        assert is_out_of_memory(raised.value)
        assert failure_of(raised.value, Status.LAUNCH_ERROR).status is Status.OUT_OF_MEMORY
        assert cuda.current is caller
        cuda.draw()
        way(lambda: None)
    assert cuda.routed == []


@WAYS
def test_a_graph_that_was_not_ended_stays_and_gives_its_memory_back(
    cuda: FakeCuda, way: Callable[[Launch], None]
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        way(refusing(cuda))
    (graph,) = capture_recovery._UNFINISHED
    assert cuda.routed == []
    assert cuda.uses[pool_of(graph)] == 0


@WAYS
def test_a_graph_that_was_ended_is_left_to_pytorch(cuda: FakeCuda, way: Callable[[Launch], None]) -> None:
    cuda.invalid = False
    with pytest.raises(torch.OutOfMemoryError):
        way(refusing(cuda))
    assert capture_recovery._UNFINISHED == []
    assert list(cuda.uses.values()) == [1], "its destructor gives that back"


@WAYS
@pytest.mark.parametrize("gives_back", [True, False])
def test_what_pytorch_puts_right_itself_is_not_put_right_twice(
    cuda: FakeCuda, way: Callable[[Launch], None], gives_back: bool
) -> None:
    """Without a way to ask whether it has given back the pool's use, that is not guessed."""
    cuda.ends_routing, cuda.gives_back = True, gives_back
    with pytest.raises(torch.OutOfMemoryError):
        way(refusing(cuda))
    (graph,) = capture_recovery._UNFINISHED
    assert cuda.routed == []
    assert cuda.uses[pool_of(graph)] == (not gives_back)
    cuda.draw()


@WAYS
def test_without_pytorchs_private_means_the_graph_is_kept_and_no_more(
    cuda: FakeCuda, way: Callable[[Launch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_releasePool")
    with pytest.raises(torch.OutOfMemoryError):
        way(refusing(cuda))
    (graph,) = capture_recovery._UNFINISHED
    assert cuda.uses[pool_of(graph)] == 1
    cuda.draw()


def test_a_shared_pool_stays_its_other_graphs(cuda: FakeCuda) -> None:
    first, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with recording(first, stream):
        pass
    with pytest.raises(torch.OutOfMemoryError), recording(torch.cuda.CUDAGraph(), stream, first.pool()):
        refusing(cuda)()
    assert cuda.routed == []
    assert cuda.uses[first.pool()] == 2, "one use too many: its memory goes when the process does"


@WAYS
def test_a_recording_that_cannot_be_ended_though_no_launch_failed_says_so(
    cuda: FakeCuda, way: Callable[[Launch], None]
) -> None:
    cuda.spoiled = True
    with pytest.raises(RuntimeError, match=ENDED):
        way(lambda: None)
    assert len(capture_recovery._UNFINISHED) == 1
    cuda.draw()


@WAYS
def test_random_numbers_are_drawn_again_where_there_is_no_room_at_all(
    cuda: FakeCuda, way: Callable[[Launch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*size: object, **words: object) -> None:
        raise FULL

    def launch() -> None:
        if cuda.recording:
            monkeypatch.setattr(torch, "empty", full)
            monkeypatch.setattr(torch, "zeros", full)
            raise FULL

    with pytest.raises(torch.OutOfMemoryError):
        way(launch)
    cuda.draw()


@WAYS
def test_what_fails_while_it_is_put_right_hides_nothing(
    cuda: FakeCuda, way: Callable[[Launch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = torch.cuda.CUDAGraph.capture_begin

    def once(graph: torch.cuda.CUDAGraph, *args: object, **words: object) -> None:
        if cuda.begun:
            raise torch.OutOfMemoryError("no room to put it right")
        begin(graph, *args, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", once)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        way(refusing(cuda))
    assert raised.value is FULL
    assert len(capture_recovery._UNFINISHED) == 2, "one that was half begun ends the process when it is freed"


def test_pytorchs_warning_of_the_empty_graph_is_not_passed_on(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    end = torch.cuda.CUDAGraph.capture_end

    def warning(graph: torch.cuda.CUDAGraph) -> None:
        end(graph)
        warnings.warn("The CUDA Graph is empty.", stacklevel=2)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", warning)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(torch.OutOfMemoryError):
            captured(refusing(cuda), 2)
    assert said == []
