"""The end-to-end check: planted timings and planted errors are told for what they are."""

from __future__ import annotations

import importlib
import math
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from convoy.capture import capture_inference
from convoy.pipeline.check import end_to_end, float64
from convoy.pipeline.check.end_to_end import Latency, errors_against, interleave, is_faster
from convoy.pipeline.check.float64 import exact_outputs
from convoy.pipeline.isolation import IsolatedCopy

# is_faster

STEADY = (1.0,) * 5


@pytest.mark.parametrize(
    ("result", "baseline", "wanted"),
    [
        (STEADY, (1.01,) * 5, True),
        (STEADY, STEADY, False),
        ((2.0,) * 5, STEADY, False),
        ((1.0, 1.0, 1.0, 1.0, 9.0), (1.5,) * 5, True),  # one lost round of five
        ((1.0, 1.0, 1.0, 9.0, 9.0), (1.5,) * 5, False),  # two
        ((1.0, 1.0, 9.0), (1.5,) * 3, False),  # one of three
        ((1.0, 1.0, 9.0), (2.0,) * 3, True),  # one of three, at half the time
        ((1.0, 9.0, 1.0, 9.0), (20.0, 8.0, 20.0, 8.0), False),  # two of four
        ((1.0, 5.0, 2.0, 9.0, 3.0), (1.1, 5.5, 2.2, 9.9, 3.3), True),  # what slows both down does not count
        ((40.0, 200.0, 62.0, 55.0, 90.0), (340.0, 700.0, 100.0, 280.0, 610.0), True),  # a busy machine
        ((40.0, 200.0, 62.0, 55.0, 90.0), (45.0, 120.0, 60.0, 70.0, 80.0), False),
        ((1.0,) * 3, (2.0,) * 5, True),  # timed one after the other
        ((math.nan,), (1.0,), False),
    ],
)
def test_faster_means_in_four_of_five_rounds(
    result: tuple[float, ...], baseline: tuple[float, ...], wanted: bool
) -> None:
    assert is_faster(Latency("convoy", result), Latency("torch.eager", baseline)) is wanted


def test_rounds_have_a_median_and_a_spread() -> None:
    assert (Latency("a", (5.0,)).median_ms, Latency("a", (5.0,)).spread_ms) == (5.0, 0.0)
    # Deciles of 0..10 are 0..10: the 20th and the 80th percentile are 2 and 8.
    steps = Latency("a", tuple(float(v) for v in range(10, -1, -1)))
    assert (steps.median_ms, steps.spread_ms) == (5.0, 3.0)
    assert Latency("a", (1.0, 1.0, 1.0, 99.0, 1.0)).median_ms == 1.0


def test_programs_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that the programs turn themselves: each takes what it says, whatever this machine does."""
    now = 0.0
    order: list[str] = []

    def program(name: str, seconds: float):
        def run() -> None:
            nonlocal now
            now += seconds
            order.append(name)

        return run

    monkeypatch.setattr(end_to_end.time, "perf_counter", lambda: now)
    found = interleave({"a": program("a", 0.5), "b": program("b", 0.25)}, cuda=False, rounds=5)
    assert found == {"a": Latency("a", (500.0,) * 5), "b": Latency("b", (250.0,) * 5)}
    assert order[-8:] == ["a", "b"] * 4  # before the first timed round, each runs once more untimed
    order.clear()
    found = interleave({"a": program("a", 0.5), "b": program("b", 0.25)}, cuda=False, rounds=3, warm=True)
    assert found == {"a": Latency("a", (500.0,) * 3), "b": Latency("b", (250.0,) * 3)}
    assert order == ["a", "b"] * 3  # each has run before: the first run counts
    order.clear()
    short = {"a": program("a", 0.04), "b": program("b", 0.03)}
    assert interleave(short, cuda=False, rounds=3, warm=True)["a"].samples_ms == pytest.approx([40.0] * 3)
    assert order == ["a", "b"] * 3
    order.clear()
    shorter = {"a": program("a", 0.04), "b": program("b", 0.01)}
    assert interleave(shorter, cuda=False, rounds=3, warm=True)["b"].samples_ms == pytest.approx([10.0] * 3)
    assert order == ["a", "b", "b", *["a", "b", "b"] * 3]  # a run of 10 ms is no round


def test_a_short_program_is_repeated_until_the_clock_can_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    calls = 0

    def run() -> None:
        nonlocal now, calls
        now += 1e-4
        calls += 1

    monkeypatch.setattr(end_to_end.time, "perf_counter", lambda: now)
    found = interleave({"a": run}, cuda=False, rounds=3)["a"]
    assert found.median_ms == pytest.approx(0.1)
    assert calls >= 3 * end_to_end.LEAST_ROUND_S / 1e-4


# errors


def test_no_error() -> None:
    y = torch.arange(6.0).reshape(2, 3)
    assert errors_against(y, [y.double()]) == end_to_end.OutputErrors(0.0, 0.0)


def test_a_planted_error_is_measured() -> None:
    exact = torch.full((4, 4), 3.0, dtype=torch.float64)  # its norm is 12
    found = exact.float()
    found[1, 2] += 6.0
    assert errors_against(found, [exact]) == end_to_end.OutputErrors(0.5, 6.0)


def test_all_outputs_count_together() -> None:
    exact = [torch.tensor([3.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64)]
    outputs = {"a": torch.tensor([3.0]), "b": (torch.tensor([5.0]), 7, torch.tensor([1, 2]))}
    assert errors_against(outputs, exact) == end_to_end.OutputErrors(0.2, 1.0)
    with pytest.raises(ValueError, match="zip"):
        errors_against(outputs["a"], exact)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_an_infinite_error(value: float) -> None:
    exact = torch.ones(3, dtype=torch.float64)
    found = exact.float()
    found[1] = value
    assert errors_against(found, [exact]) == end_to_end.OutputErrors(math.inf, math.inf)


def test_what_overflows_in_the_stock_model_too_is_no_error() -> None:
    exact = torch.tensor([1.0, math.inf, 2.0], dtype=torch.float64)
    assert errors_against(exact.float(), [exact]) == end_to_end.OutputErrors(0.0, 0.0)
    assert errors_against(torch.tensor([1.0, 5.0, 2.0]), [exact]).max_abs_error == math.inf


def test_against_zeros_the_error_is_absolute() -> None:
    assert errors_against(torch.tensor([3.0, 4.0]), [torch.zeros(2, dtype=torch.float64)]) == end_to_end.OutputErrors(
        5.0, 4.0
    )
    assert errors_against(torch.zeros(0, 3), [torch.zeros(0, 3, dtype=torch.float64)]) == end_to_end.OutputErrors(
        0.0, 0.0
    )
    assert errors_against(torch.tensor(2.0), [torch.tensor(1.0, dtype=torch.float64)]) == end_to_end.OutputErrors(
        1.0, 1.0
    )


def test_only_the_images_that_the_oracle_has_are_compared() -> None:
    exact = torch.ones(2, 3, dtype=torch.float64)
    found = torch.cat([exact.float(), torch.full((4, 3), 9.0)])
    assert errors_against(found, [exact]) == end_to_end.OutputErrors(0.0, 0.0)


# the oracle


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0, offset: torch.Tensor | None = None) -> torch.Tensor:
        y = self.conv(x) * scale
        return y if offset is None else y + offset


def test_the_oracle_computes_in_float64_and_leaves_the_model_alone() -> None:
    model = Net().half()
    x = torch.randn(2, 3, 8, 8).half()
    with torch.no_grad():
        (found,) = exact_outputs(model, (x,), {"scale": 2.0}, flops=1)
        weight, bias = model.conv.weight.double(), model.conv.bias.double()
        assert torch.equal(found, torch.conv2d(x.double(), weight, bias) * 2.0)
    assert found.dtype == torch.float64
    assert model.conv.weight.dtype == torch.float16


def test_a_large_batch_is_checked_on_its_first_images() -> None:
    model, x = Net(), torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        whole = model(x)
        for flops, kept in (
            (float64.ORACLE_FLOPS, 8),
            (float64.ORACLE_FLOPS * 2, 4),
            (float64.ORACLE_FLOPS * 1e3, 1),
        ):
            (found,) = exact_outputs(model, (x,), {}, flops=int(flops))
            assert len(found) == kept
            assert errors_against(whole, [found]).rel_l2_error < 1e-6
        # Of inputs with several first sides, nobody knows which is the batch.
        (found,) = exact_outputs(model, (x,), {"offset": torch.ones(1, 4, 1, 1)}, flops=int(float64.ORACLE_FLOPS * 9))
        assert len(found) == 8


class Large(Net):
    """A net that has no room for more than so many images in float64, as often as it is asked on the device."""

    most: int
    asked: ClassVar[list[int]] = []
    on_host_after = 99

    def forward(self, x: torch.Tensor, scale: float = 1.0, offset: torch.Tensor | None = None) -> torch.Tensor:
        if x.dtype == torch.float64:
            self.asked.append(len(x))
            if len(x) > self.most and len(self.asked) <= self.on_host_after:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x, scale, offset)


def large(monkeypatch: pytest.MonkeyPatch, most: int, on_host_after: int = 99) -> Large:
    monkeypatch.setattr(Large, "asked", [])
    monkeypatch.setattr(Large, "on_host_after", on_host_after)
    net = Large()
    net.most = most
    return net


@pytest.mark.parametrize(("most", "asked"), [(8, [8]), (5, [8, 4]), (1, [8, 4, 2, 1])])
def test_where_float64_has_no_room_fewer_images_are_checked(
    monkeypatch: pytest.MonkeyPatch, most: int, asked: list[int]
):
    model, x = large(monkeypatch, most), torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        (found,) = exact_outputs(model, (x,), {}, flops=1)
        assert model.asked == asked
        assert len(found) == asked[-1]
        assert errors_against(model(x), [found]).rel_l2_error < 1e-6


def test_where_there_is_room_for_no_image_the_host_computes_as_many_as_it_may(monkeypatch: pytest.MonkeyPatch):
    model, x = large(monkeypatch, 0, on_host_after=4), torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        (found,) = exact_outputs(model, (x,), {}, flops=int(float64.ORACLE_FLOPS))
        assert model.asked == [8, 4, 2, 1, 8]
        assert errors_against(model(x), [found]).rel_l2_error < 1e-6


def test_a_model_that_the_host_cannot_run_either_is_out_of_memory(monkeypatch: pytest.MonkeyPatch):
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        exact_outputs(large(monkeypatch, 0), (torch.randn(2, 3, 8, 8),), {}, flops=1)


def test_of_inputs_without_a_common_batch_none_is_cut(monkeypatch: pytest.MonkeyPatch):
    model, x = large(monkeypatch, 5, on_host_after=1), torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        (found,) = exact_outputs(model, (x,), {"offset": torch.ones(1, 4, 1, 1)}, flops=1)
    assert model.asked == [8, 8]
    assert len(found) == 8


class Plus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_cudnn_searches_from_the_stock_modules_first_call_on(monkeypatch: pytest.MonkeyPatch):
    """PyTorch keeps the first plan of a convolution that it finds: a call before the search would make a weak baseline."""
    held: list[bool] = []

    @contextmanager
    def recorded(numerics: str, device: torch.device) -> Generator[None]:
        held.append(True)
        yield
        held.pop()

    class Watched(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert held
            Watched.calls += 1
            return x + 1

    net_check, stock_step = map(
        importlib.import_module, ("convoy.pipeline.check.net_check", "convoy.training.stock_step")
    )
    for module in (net_check, stock_step):
        monkeypatch.setattr(module, "convolutions", recorded)
    x = torch.ones(2)
    program = SimpleNamespace(runnable=lambda inputs: [inputs[0] + 1])
    net = SimpleNamespace(
        target=SimpleNamespace(device="cpu"), regions=[], captured=None, original=capture_inference(Plus(), (x,))
    )
    check = net_check.NetCheck(net, IsolatedCopy(Watched(), (x,), {}))

    class Served:
        runnable = None

        def __call__(self, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
            return args[0] + 1

    assert check.both(Served())
    assert Watched.calls > 3
    calls = Watched.calls
    stock = SimpleNamespace(
        run=lambda: [Watched()(x)], exact=lambda: [Watched()(x.double())], unit=2.0**-24, unit_of_all=2.0**-24
    )
    capture = SimpleNamespace(random=False, learned=())
    assert stock_step.StepCheck(stock, [x], capture, flops=0).both(program)
    assert Watched.calls > calls
    assert not held
