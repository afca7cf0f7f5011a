"""Where stock PyTorch's own result is wrong, whatever the cause, the user is told and a plan that is right is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.pipeline.check.end_to_end import OutputErrors, errors_against, falls_back
from convoy.pipeline.check.float64 import exact_outputs
from convoy.pipeline.check.rounding import unit_roundoff
from convoy.settings import Settings
from convoy.training.stock_step import StepCheck, StockStep


class Lossy(torch.autograd.Function):
    """A library that loses the last column, of the result or of the gradient, unless it is in float64."""

    @staticmethod
    def forward(ctx: object, y: torch.Tensor, backward: bool) -> torch.Tensor:
        ctx.backward_too = backward  # type: ignore[attr-defined]
        return y.clone() if backward or y.dtype == torch.float64 else _without_last(y)

    @staticmethod
    def backward(ctx: object, *dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        lossy = ctx.backward_too and dy[0].dtype != torch.float64  # type: ignore[attr-defined]
        return _without_last(dy[0]) if lossy else dy[0], None


def _without_last(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[..., -1] = 0
    return y


class WrongForward(nn.Conv2d):
    """Right in float64 and where it is captured, wrong where it is run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if torch.compiler.is_exporting() else Lossy.apply(y, False)


def test_a_wrong_stock_net_is_told_of_and_the_plan_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.pipeline.check.end_to_end.why_slow", lambda *_: "it is slow")
    # A library's operator is as wrong in the captured graph as in the module.
    monkeypatch.setattr("convoy.pipeline.check.net_oracle._graph_errors", lambda *_: OutputErrors(1.0, 1.0))
    torch.manual_seed(1)
    net, x = WrongForward(4, 4, 3, padding=1).eval(), torch.randn(1, 4, 8, 8)
    with pytest.warns(UserWarning, match="PyTorch's own outputs are wrong here"):
        fast = convoy.optimize(net, (x,), settings=Settings(effort="none", db=tmp_path / "perf.db"))
    assert any("PyTorch's own outputs are wrong here" in note for note in fast.plan.notes)
    assert any("it is slow, but kept: PyTorch's own run is wrong" in note for note in fast.plan.notes)
    assert not fast.plan.baseline
    with torch.no_grad():
        assert errors_against(fast(x), exact_outputs(net, (x,), {}, 0)).rel_l2_error < 1e-5


class Layer(nn.Module):
    """A convolution, maybe with a gradient that loses a column, and a classifier."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.fc, self.wrong = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y = Lossy.apply(y, True) if self.wrong else y
        return self.fc(torch.tanh(y).mean((2, 3)))


class Capture:
    """As much of a captured step as the check looks at."""

    random = False
    learned = ("conv.weight", "conv.bias", "fc.weight", "fc.bias")


@pytest.mark.parametrize("wrong", [False, True])
def test_wrong_gradients_of_stock_pytorch_are_told_of(wrong: bool) -> None:
    torch.manual_seed(3)
    batch = torch.randn(4, 3, 6, 6), torch.arange(4)
    stock = StockStep(Layer(wrong=wrong), cross_entropy, None, batch, scaled=False)
    check = StepCheck(stock, list(batch), Capture(), flops=0)  # type: ignore[arg-type]
    assert check.note == ""
    assert check.wrong.startswith("PyTorch's own loss and gradients are wrong here") is wrong
    assert check.stock().errors.rel_l2_error < 1e-4  # what a plan is held to


def test_a_wrong_plan_is_not_kept_because_stock_is_wrong_too() -> None:
    settings = Settings()
    assert falls_back("slow", "", None, "cpu", settings, True)[0] is False  # type: ignore[arg-type]
    assert falls_back("slow", "wrong", None, "cpu", settings, True)[0] is True  # type: ignore[arg-type]
    assert falls_back("slow", "", None, "cpu", settings)[0] is True  # type: ignore[arg-type]


def test_torchs_flags_for_a_cpu_make_fp32_as_coarse_as_bf16() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    assert unit_roundoff([torch.float32], cuda=False) == 2.0**-24
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert unit_roundoff([torch.float32], cuda=False) == 2.0**-8
        assert unit_roundoff([torch.float64], cuda=False) == 2.0**-53
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
