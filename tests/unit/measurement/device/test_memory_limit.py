"""A limit of what tuning may take of a GPU, on a machine without one."""

from types import SimpleNamespace

import pytest
import torch

from convoy.errors import InputError
from convoy.measurement.device import memory_limit
from convoy.measurement.device.memory_limit import (
    BUILDERS_FRACTION,
    CONTEXT_BYTES,
    MAX_CONTEXT_GROWTH,
    MIN_ISOLATED_BYTES,
    MIN_TENSOR_BYTES,
    SPARE_BYTES,
    MemoryLimit,
    MemorySplit,
    lost_fraction,
    memory_limited,
    refresh_memory_limit,
)
from convoy.measurement.processes import worker
from convoy.measurement.processes.process import worker_handshake
from convoy.target import Target

GPU = Target("cuda", "test", "sm_90", 132, 1000, 0)

MIB = 1 << 20

SPARE = SPARE_BYTES // MIB


class Device:
    """A GPU of 80 000 MiB, on which one process is looked at, and its allocator; sizes in MiB.

    Attributes:
        held: what PyTorch holds in this process.
        others: what all else takes: contexts, this process's own too, and other processes.
        most: what PyTorch may hold here.
        context: of this process; None where the driver does not tell.
    """

    TOTAL = 80_000

    def __init__(self) -> None:
        self.held, self.others, self.most = 100, 900, 70_000
        self.context: int | None = None

    @property
    def own(self) -> int | None:
        return None if self.context is None else (self.held + self.context) * MIB

    @property
    def free(self) -> tuple[int, int]:
        return (self.TOTAL - self.held - self.others) * MIB, self.TOTAL * MIB

    @property
    def fraction(self) -> float:
        return self.most / self.TOTAL

    def limit(self, fraction: float) -> None:
        self.most = round(fraction * self.TOTAL)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(memory_limit, "_limits", [])
    monkeypatch.setattr(memory_limit, "own_bytes", lambda: found.own)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: found.free)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=found.TOTAL * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: found.held * MIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", found.limit)
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda: found.fraction)
    return found


@pytest.mark.parametrize(("further", "most"), [(200, 300 - SPARE), (None, 70_000), (100_000, 80_000)])
def test_a_limit_is_beyond_what_is_held_and_ends_with_the_block(device: Device, further: int | None, most: int) -> None:
    def fails() -> None:
        with memory_limited("cuda", None if further is None else further * MIB, isolate=False):
            assert device.most == most
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert device.most == 70_000
    refresh_memory_limit()
    assert device.most == 70_000, "there is no limit any more"


def test_a_cpu_is_not_limited(device: Device) -> None:
    with memory_limited("cpu", 200 * MIB, isolate=True):
        refresh_memory_limit()
        assert device.most == 70_000


def test_what_contexts_grow_by_is_not_there_for_tensors(device: Device) -> None:
    with memory_limited("cuda", 2000 * MIB, isolate=False):
        for grown, most in ((300, 1800), (-200, 2100), (10_000, 2100 - MAX_CONTEXT_GROWTH // MIB)):
            device.others = 900 + grown
            device.held = 700  # tensors are no growth
            refresh_memory_limit()
            assert device.most == most - SPARE
    with memory_limited("cuda", 400 * MIB, isolate=False):
        device.others += 600
        refresh_memory_limit()
        assert device.most == 700 + 400 - SPARE - 600
        device.others += 10_000
        device.held = 0
        refresh_memory_limit()
        assert device.most == 700 + 400 - SPARE - MAX_CONTEXT_GROWTH // MIB
    with memory_limited("cuda", 100 * MIB, isolate=False):
        device.others += 10_000
        refresh_memory_limit()
        assert device.most == MIN_TENSOR_BYTES // MIB


def test_all_that_tuning_takes_stays_within_the_limit_while_contexts_grow(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measuring process may hold less where contexts and the tuning process have grown."""
    limit, began = 3000, device.held + device.others
    with memory_limited("cuda", limit * MIB, isolate=True):
        device.others += 50  # libraries load code here
        device.held += 150  # and this process holds more than it did
        hello = worker_handshake(GPU, (), 1.0, role="measure", memory_limit=MemoryLimit.of_measuring(limit * MIB))
    before = device.held + device.others
    context = CONTEXT_BYTES // MIB + 70
    device.held, device.others = 0, before + context
    monkeypatch.setattr(memory_limit, "_limits", [])
    worker._mirror(hello, GPU)
    assert before + context + device.most == began + limit - SPARE
    device.held, device.others = 500, before + context + 30
    refresh_memory_limit()
    assert before + context + 30 + device.most == began + limit - SPARE


def test_where_the_driver_tells_other_programs_take_nothing_of_the_room(device: Device) -> None:
    """Their growth is no context of ours, nor does it hide that ours has grown."""
    device.context = 500
    with memory_limited("cuda", 2000 * MIB, isolate=False):
        for others, context, most in ((40_000, 500, 2100), (40_000, 800, 1800), (100, 1900, 700), (900, 400, 2100)):
            device.others, device.context, device.held = others, context, 700
            refresh_memory_limit()
            assert device.most == most - SPARE
        device.context = 9000
        refresh_memory_limit()
        assert device.most == MIN_TENSOR_BYTES // MIB
        device.context = None  # a driver that answered before
        device.others = 950
        refresh_memory_limit()
        assert device.most == 2050 - SPARE


@pytest.mark.parametrize(
    ("here", "before", "most"), [(0, 0, 3000 - 640), (150, 60, 3000 - 640 - 210), (-50, -20, 3000 - 640)]
)
def test_where_the_driver_tells_what_the_tuning_process_has_grown_by_is_not_there_for_the_measuring_one(
    device: Device, monkeypatch: pytest.MonkeyPatch, here: int, before: int, most: int
) -> None:
    device.context, limit = 500, 3000
    with memory_limited("cuda", limit * MIB, isolate=True):
        device.held, device.context = device.held + here, device.context + before
        hello = worker_handshake(GPU, (), 1.0, role="measure", memory_limit=MemoryLimit.of_measuring(limit * MIB))
    monkeypatch.setattr(memory_limit, "_limits", [])
    device.held, device.context, device.others = 0, 550, 30_000
    worker._mirror(hello, GPU)
    assert device.most == most - SPARE, "a context that is smaller than was expected gives nothing"
    device.context = CONTEXT_BYTES // MIB + 70
    refresh_memory_limit()
    assert device.most == most - SPARE - 70


@pytest.mark.parametrize("builders", [0, 1, 5])
def test_contexts_come_out_of_the_limit(builders: int) -> None:
    limit = int((builders + 0.5) * CONTEXT_BYTES / BUILDERS_FRACTION)
    shares = MemorySplit.of(limit, isolate=True)
    assert shares.builders == builders
    assert shares.measuring + (builders + 1) * CONTEXT_BYTES == limit - SPARE_BYTES  # while it measures
    assert shares.here + builders * CONTEXT_BYTES == limit - SPARE_BYTES  # when that process has ended
    assert MemorySplit.of(limit, isolate=False) == MemorySplit(0, limit - SPARE_BYTES, limit - SPARE_BYTES)


def test_contexts_that_are_expected_are_no_growth(device: Device) -> None:
    limit = int(5.5 * CONTEXT_BYTES / BUILDERS_FRACTION)
    with memory_limited("cuda", limit, isolate=True):
        device.others += 5 * CONTEXT_BYTES // MIB
        refresh_memory_limit()
        assert device.most == device.held + MemorySplit.of(limit, isolate=True).here // MIB


def test_a_limit_without_room_for_the_measuring_process_is_refused(device: Device) -> None:
    least = MIN_ISOLATED_BYTES
    assert MemorySplit.of(least, isolate=True).measuring == MIN_TENSOR_BYTES
    with pytest.raises(
        InputError, match=r"tuning_memory_bytes: got '799 MiB', expected at least 800 MiB.*isolate=False"
    ):
        MemorySplit.of(least - MIB, isolate=True)
    with pytest.raises(InputError, match="tuning_memory_bytes"), memory_limited("cuda", least - 1, isolate=True):
        pass
    assert device.most == 70_000


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory\nmore")]
)
def test_a_limit_under_which_nothing_can_run_is_refused_in_its_own_name(device: Device, error: Exception) -> None:
    expected = (
        r"tuning_memory_bytes: got '200 MiB', expected as much .* while it runs \(CUDA .*out of memory.?\). Allow"
    )
    with pytest.raises(InputError, match=expected), memory_limited("cuda", 200 * MIB, isolate=False):
        raise error
    assert device.most == 70_000
    with pytest.raises(type(error)), memory_limited("cuda", None, isolate=False):
        raise error


def test_a_measuring_process_without_a_limit_has_none(device: Device) -> None:
    worker._mirror(worker_handshake(GPU, (), 1.0, role="measure"), GPU)
    refresh_memory_limit()
    assert device.most == 70_000


def test_a_process_that_measures_within_a_limit_of_its_own_has_what_is_left_of_it(device: Device) -> None:
    """A runner that is used by itself, without a tuning that began."""
    limit = 2000 * MIB
    found = MemoryLimit.of_measuring(limit)
    assert found == MemoryLimit(
        limit - SPARE_BYTES - CONTEXT_BYTES, None, (device.held + device.others) * MIB + CONTEXT_BYTES
    )
    device.context = 500
    found = MemoryLimit.of_measuring(limit)
    assert (found.tensors, found.context) == (limit - SPARE_BYTES - CONTEXT_BYTES, CONTEXT_BYTES)


def test_how_much_of_its_room_a_process_has_lost_is_known(device: Device) -> None:
    assert lost_fraction(500 * MIB) == 0
    device.context = 700
    with memory_limited("cuda", (1000 + SPARE) * MIB, isolate=False):
        for context, idle, share in ((700, 0, 0.0), (600, 0, 0.0), (975, 0, 0.25), (975, 275, 0.5), (2800, 0, 1.91)):
            device.context = context
            assert lost_fraction(idle * MIB) == pytest.approx(share, abs=0.01)
    assert lost_fraction(0) == 0
