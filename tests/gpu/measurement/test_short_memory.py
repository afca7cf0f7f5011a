"""A GPU that is nearly full: what the oracle has no room for is checked on fewer images, or on the host."""

import copy
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.manifest import load_engine
from convoy.measurement import detect_target, peaks
from convoy.measurement.candidate import prepare
from convoy.measurement.device.memory_limit import CONTEXT_BYTES
from convoy.measurement.guards import checksum
from convoy.measurement.reference_data import ReferenceData
from convoy.measurement.timer import captured
from convoy.pipeline.ceilings import measure_ceilings
from convoy.pipeline.check.end_to_end import errors_against
from convoy.pipeline.check.end_to_end_check import TIMED_SEPARATELY, ComparedRun
from convoy.pipeline.check.float64 import exact_outputs
from convoy.pipeline.check.net_check import NetCheck
from convoy.problem import ConvProblem, Epilogue
from convoy.program.cuda.recording import forget_library_workspaces, recording

pytestmark = pytest.mark.gpu

IMAGES = 64

ENGINES = ("cudnn", "cuda.implicit_gemm", "triton.implicit_gemm", "zeroskip.channels")
"""Enough of them to choose from; for the last, zeros are counted."""

LIMIT = 640 << 20
"""For tensors, and for what a context grows by; a process that measures has its own context besides."""


def limit(size: int) -> None:
    """Let PyTorch hold so many bytes more than it does."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)


def remnants() -> list[torch.Tensor]:
    """Take the memory that is free between the tensors that are there."""
    taken = []
    for size in (1 << 26, 1 << 20, 1 << 15, 1 << 9):
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return taken


@contextmanager
def room(size: int) -> Generator[None]:
    """Let PyTorch take so many bytes, and no more."""
    forget_library_workspaces()  # or one that a recording forgets would be room for it
    torch.cuda.empty_cache()
    limit(0)
    taken = remnants()
    limit(size)
    try:
        yield
    finally:
        del taken
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_the_oracle_of_a_layer_answers_for_fewer_images() -> None:
    """In float64 the layer's results take 411 MB, twice that with the activation."""
    problem = ConvProblem(
        IMAGES, 16, 56, 56, 256, 3, 3, 1, 1, layout="nhwc", x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16", numerics="half",
        epilogue=Epilogue(activation="relu"),
    )  # fmt: skip
    with room(500 << 20), torch.no_grad():
        bench = ReferenceData(problem, detect_target("cuda"))
        bench.fill()
        assert 2 <= len(bench.checked) < IMAGES
        assert bench.checked[-1] == IMAGES - 1
        ready = prepare(bench, load_engine("aten").config())
    assert 0 < ready.error < 1e-3


@pytest.mark.parametrize(("size", "where", "images"), [(500 << 20, "cuda", None), (0, "cpu", IMAGES)])
def test_the_oracle_of_a_net_answers_for_fewer_images_or_on_the_host(size: int, where: str, images: int | None) -> None:
    model = nn.Sequential(nn.Conv2d(16, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).half().cuda()
    x = torch.randn(IMAGES, 16, 56, 56, device="cuda", dtype=torch.half)
    with torch.no_grad():
        whole = model(x)
        with room(size):
            (exact,) = exact_outputs(model, (x,), {}, flops=1)
        assert exact.device.type == where
        assert len(exact) == images or (images is None and 1 <= len(exact) < IMAGES)
        assert errors_against(whole, [exact]).rel_l2_error < 1e-3


def test_a_recording_without_room_to_begin_is_refused() -> None:
    """PyTorch would end the process, where no other graph is there."""
    stream = torch.cuda.Stream()
    with room(0):
        with pytest.raises(torch.OutOfMemoryError):
            captured(lambda: None, 3)
        with pytest.raises(torch.OutOfMemoryError), recording(torch.cuda.CUDAGraph(), stream):
            pytest.fail("it was begun")
    x = torch.ones(3, device="cuda")
    captured(lambda: x.add_(1), 3).replay()
    assert x.tolist() == [5.0] * 3  # one launch before the recording


def test_ceilings_without_room_are_not_known() -> None:
    """The copy that is timed wants 200 MB, a product in fp32 192."""
    peaks.cache_clear()
    with room(64 << 20):
        assert measure_ceilings(detect_target("cuda")) is None
    found = measure_ceilings(detect_target("cuda"))
    assert found is not None
    assert found.bytes_per_s > 1e11
    assert torch.cuda.memory_reserved() <= 64 << 20  # what it took was given back


def test_a_checksum_takes_little_beside_what_it_sums() -> None:
    data = torch.randn(64 << 20, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sums = checksum((data,))
    assert torch.cuda.max_memory_allocated() - before < 48 << 20  # of 256 MiB
    data[12345678] += 1
    assert not all(torch.equal(a, b) for a, b in zip(sums, checksum((data,)), strict=True))


class Wide(nn.Sequential):
    """Two convolutions with 103 MB of fp16 between them at 64 images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(16, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 32, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )  # fmt: skip


@pytest.mark.parametrize("isolate", [True, False])
def test_tuning_keeps_to_its_limit(tmp_path: Path, isolate: bool) -> None:
    """The float64 run of the whole net alone wants 822 MB."""
    torch.manual_seed(0)
    model = Wide().half().cuda().eval()
    x = torch.randn(IMAGES, 16, 56, 56, device="cuda", dtype=torch.half)
    torch.cuda.empty_cache()
    before, share = torch.cuda.memory_reserved(), torch.cuda.memory.get_per_process_memory_fraction()
    torch.cuda.reset_peak_memory_stats()
    most = LIMIT + isolate * CONTEXT_BYTES
    settings = convoy.Settings(
        db=tmp_path / "perf.db", tuning_memory_bytes=most, time_s=40, isolate=isolate, only_engines=ENGINES
    )
    fast = convoy.optimize(model, (x,), settings=settings)
    assert torch.cuda.max_memory_reserved() <= before + most
    assert torch.cuda.memory.get_per_process_memory_fraction() == share
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # a module that falls back is PyTorch's, and says so
        exact = copy.deepcopy(model).double()(x.double())
        assert errors_against(fast(x), [exact]).rel_l2_error < 1e-3
    assert not any("zeros could not be counted for lack of memory" in note for note in fast.plan.notes)


def test_a_plan_without_room_for_the_stock_net_beside_it_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, asked = NetCheck.stock, []

    def crowded(check: NetCheck) -> ComparedRun:
        asked.append(torch.cuda.memory_allocated())
        if len(asked) % 2:  # beside each program; the second call is for the run alone
            raise torch.OutOfMemoryError("CUDA out of memory, planted")
        return whole(check)

    monkeypatch.setattr(NetCheck, "stock", crowded)
    model = Wide().half().cuda().eval()
    x = torch.randn(IMAGES, 16, 56, 56, device="cuda", dtype=torch.half)
    settings = convoy.Settings(db=tmp_path / "perf.db", time_s=40, only_engines=ENGINES)
    fast = convoy.optimize(model, (x,), settings=settings)
    assert TIMED_SEPARATELY in fast.plan.notes
    assert asked[1] < asked[0]  # the program was gone
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), atol=2e-2)
