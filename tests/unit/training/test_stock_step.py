"""PyTorch's step in float64: in nchw and without autocast, whatever the model's memory format is; and what stands for it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy.capture import capture_training
from convoy.pipeline.check import end_to_end, float64
from convoy.training.stock_step import StepCheck, StockStep
from tests.unit.training.training_nets import batches, net

SEEN: list[tuple[bool, bool, torch.dtype]] = []


class Watched(nn.Module):
    """A net that notes the memory formats and the dtype of its images and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append((x.is_contiguous(), self.net.stem.weight.is_contiguous(), x.dtype))
        return self.net(x)


def test_the_exact_step_is_in_nchw_and_leaves_the_stock_one_as_it_is():
    model = Watched().to(memory_format=torch.channels_last)
    ((x, y),) = batches(1)
    stock = StockStep(model, cross_entropy, torch.bfloat16, (x.to(memory_format=torch.channels_last), y), scaled=False)
    SEEN.clear()
    exact, own = stock.exact(), stock.run()
    wide, stock_own = SEEN
    assert wide == (True, True, torch.float64)
    assert stock_own == (False, False, torch.float32)
    assert all(t.dtype == torch.float64 for t in exact)
    errors = [float((a - b).norm() / a.norm()) for a, b in zip(exact, own, strict=True)]
    assert 0.0 < max(errors) < 0.1  # bf16's


class Step:
    """A tuned step that is not there: gives what a function gives."""

    def __init__(self, run: Callable[[], list[torch.Tensor]]) -> None:
        self.runnable = lambda inputs: torch.enable_grad()(run)()


def allowed(errors: end_to_end.OutputErrors, baseline: end_to_end.OutputErrors) -> bool:
    return errors.rel_l2_error <= end_to_end.WORST_ERROR * baseline.rel_l2_error


@pytest.mark.parametrize(("random", "flops"), [(True, 0), (False, int(float64.ORACLE_FLOPS) + 1)])
def test_without_float64_rounding_says_how_far_a_step_may_be_off(random: bool, flops: int):
    """In another precision the same step is right; with one gradient missing, or weaker by half, it is not."""
    batch = batches(1)[0]
    stock = StockStep(net(0.5), cross_entropy, torch.bfloat16, batch, scaled=False)
    precise = StockStep(net(0.5), cross_entropy, None, batch, scaled=False)
    learned = [name for name, _ in net().named_parameters()]
    capture = SimpleNamespace(random=random, learned=learned)

    def outcome(change: Callable[[list[torch.Tensor]], object]) -> tuple[bool, str]:
        def run() -> list[torch.Tensor]:
            made = precise.run()
            change(made)
            return made

        check = StepCheck(stock, [batch[0]], capture, flops=flops)  # type: ignore[arg-type]
        found = check.both(Step(run))  # type: ignore[arg-type]
        assert found is not None
        return allowed(found.errors, found.baseline_errors), check.note

    right, note = outcome(lambda made: None)
    assert right
    assert ("random numbers" if random else "too long") in note
    assert "one rounding" in note
    assert not outcome(lambda made: made[1 + learned.index("fc.weight")].zero_())[0]
    assert not outcome(lambda made: made[1 + learned.index("conv.weight")].mul_(0.5))[0]


def test_a_step_without_room_for_float64_is_held_to_rounding(monkeypatch: pytest.MonkeyPatch):
    def full() -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    batch = batches(1)[0]
    stock = StockStep(net(), cross_entropy, torch.bfloat16, batch, scaled=False)
    monkeypatch.setattr(stock, "exact", full)
    capture = SimpleNamespace(random=False, learned=[name for name, _ in net().named_parameters()])
    precise = StockStep(net(), cross_entropy, None, batch, scaled=False)
    check = StepCheck(stock, [batch[0]], capture, flops=0)  # type: ignore[arg-type]
    found = check.both(Step(precise.run))  # type: ignore[arg-type]
    assert found is not None
    assert "does not fit in float64" in check.note
    assert found.errors.rel_l2_error > 0
    assert allowed(found.errors, found.baseline_errors)


class Casting(nn.Module):
    """A convolution whose result is rounded to bfloat16, and a classifier in the precision that `back` says."""

    def __init__(self, *, back: torch.dtype | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.fc, self.back = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.conv(x)).bfloat16().to(self.back or x.dtype)
        return self.fc(40 * y.square().mean((2, 3)))


@pytest.mark.parametrize("back", [torch.float32, None], ids=["no-float64", "float64"])
def test_what_a_forward_pass_rounds_itself_is_rounding_and_no_fault(back: torch.dtype | None):
    """In float64 the module runs only without a cast to fp32; the captured graph runs in it in any case."""
    batch = batches(1)[0]
    model = Casting(back=back)
    capture = capture_training(model, cross_entropy, batch, amp=None, scaled=False)
    stock = StockStep(model, cross_entropy, None, batch, scaled=False, capture=capture)
    tensors = dict(model.named_parameters())
    check = StepCheck(stock, [*(tensors[name].detach() for name in capture.parameters), *batch], capture, flops=0)
    assert (check.note, check.wrong) == ("", "")
    assert 1e-3 < check.stock().errors.rel_l2_error < 2.0**-6
