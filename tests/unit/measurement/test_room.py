"""A limit of what tuning may take of a GPU, on a machine without one."""

from types import SimpleNamespace

import pytest
import torch

from convoy.errors import InputError
from convoy.measurement import worker
from convoy.measurement.process import greeting
from convoy.measurement.room import BUILDERS_SHARE, CONTEXT_BYTES, LEAST_TENSOR_BYTES, Shares, memory_limited
from convoy.target import Target

GPU = Target("cuda", "test", "sm_90", 132, 1000, 0)


class Allocator:
    """Of a GPU with 1000 bytes of memory, 100 of them held."""

    def __init__(self) -> None:
        self.fraction = 0.9

    def limit(self, fraction: float) -> None:
        self.fraction = fraction


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", found.limit)
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda: found.fraction)
    return found


@pytest.mark.parametrize(("further", "share"), [(200, 0.3), (None, 0.9), (5000, 1.0)])
def test_a_limit_is_beyond_what_is_held_and_ends_with_the_block(
    allocator: Allocator, further: int | None, share: float
) -> None:
    def fails() -> None:
        with memory_limited("cuda", further, isolate=False):
            assert allocator.fraction == share
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert allocator.fraction == 0.9


def test_a_cpu_is_not_limited(allocator: Allocator) -> None:
    with memory_limited("cpu", 200, isolate=True):
        assert allocator.fraction == 0.9


@pytest.mark.parametrize("builders", [0, 1, 5])
def test_contexts_come_out_of_the_limit(builders: int) -> None:
    limit = int((builders + 0.5) * CONTEXT_BYTES / BUILDERS_SHARE)
    shares = Shares.of(limit, isolate=True)
    assert shares.builders == builders
    assert shares.measuring + (builders + 1) * CONTEXT_BYTES == limit  # while it measures
    assert shares.here + builders * CONTEXT_BYTES == limit  # when that process has ended
    assert Shares.of(limit, isolate=False) == Shares(0, limit, limit)


def test_a_limit_without_room_for_the_measuring_process_is_refused() -> None:
    least = CONTEXT_BYTES + LEAST_TENSOR_BYTES
    assert Shares.of(least, isolate=True).measuring == LEAST_TENSOR_BYTES
    with pytest.raises(InputError, match=r"tuning_memory: got '703 MiB', expected at least 704 MiB.*isolate=False"):
        Shares.of(least - (1 << 20), isolate=True)
    with pytest.raises(InputError, match="tuning_memory"), memory_limited("cuda", least - 1, isolate=True):
        pass


@pytest.mark.parametrize(("memory_bytes", "share"), [(250, 0.25), (None, 0.9)])
def test_the_measuring_process_keeps_to_the_limit(allocator: Allocator, memory_bytes: int | None, share: float) -> None:
    hello = greeting(GPU, (), 1.0, role="measure", memory_bytes=memory_bytes)
    worker._mirror(hello, GPU)
    assert allocator.fraction == share
