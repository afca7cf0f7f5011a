"""Gradients of a plan may be as far off as the rounding of allowed products takes them, also where PyTorch's own are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import convoy
from convoy.pipeline.check.end_to_end import OutputErrors
from convoy.pipeline.check.rounding import TF32_ROUNDING
from convoy.pipeline.check.rounding_bound import FP32_UNIT, allowed_baseline
from convoy.torch_compile import training_graph
from convoy.training import stock_step
from tests.unit.pipeline.untimed import keep_plans
from tests.unit.training.training_nets import batches, net, sgd

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""A program: takes a graph's inputs, gives its results."""


def in_tf32(run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every input of fp32 rounded to TF32's ten bits."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        bits = tensor.detach().clone().view(torch.int32)
        return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)

    return run([rounded(tensor) for tensor in inputs])


def with_a_fault(run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every result of floating-point numbers too large by 5 %."""
    return [made * 1.05 if made.is_floating_point() else made for made in run(inputs)]


@pytest.fixture(autouse=True)
def plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    keep_plans(monkeypatch)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A database without the plans of other cases."""
    return tmp_path / "perf.db"


CASES = pytest.mark.parametrize(
    ("change", "unit", "numerics", "is_right"),
    [
        (in_tf32, TF32_ROUNDING, "as_torch", True),
        (with_a_fault, TF32_ROUNDING, "as_torch", False),
        (in_tf32, FP32_UNIT, "as_torch", False),
        (in_tf32, TF32_ROUNDING, "strict", False),
    ],
    ids=["tf32", "fault", "fp32", "strict"],
)


@CASES
def test_gradients_of_a_training_step(
    change: Callable[..., Any], unit: float, numerics: str, is_right: bool, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = stock_step.StepCheck.ours

    def changed(check: stock_step.StepCheck, program: Any) -> Any:
        return right(check, SimpleNamespace(runnable=lambda inputs: change(program.runnable, inputs)))  # type: ignore[arg-type]

    monkeypatch.setattr(stock_step.StepCheck, "ours", changed)
    monkeypatch.setattr(stock_step, "unit_roundoff", lambda dtypes, *, cuda: unit)
    model = net()
    settings = convoy.Settings(effort="none", numerics=numerics, db=db)
    step = convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings)
    assert step.plan.baseline is not is_right
    assert any("the gradients' error" in note for note in step.plan.notes) is not is_right


@CASES
def test_passes_of_a_compiled_model(
    change: Callable[..., Any], unit: float, numerics: str, is_right: bool, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[training_graph.TracedGraph] = []
    tune = training_graph.TracedGraph._tune

    def remember(graph: training_graph.TracedGraph, args: Sequence[Any]) -> Any:
        made.append(graph)
        return tune(graph, args)

    eager = training_graph.eager_of
    monkeypatch.setattr(training_graph.TracedGraph, "_tune", remember)
    monkeypatch.setattr(training_graph, "eager_of", lambda runnable: lambda args: change(eager(runnable), args))
    monkeypatch.setattr(training_graph, "unit_roundoff", lambda dtypes, *, cuda: unit)
    model = net()
    compiled = torch.compile(model, backend="convoy", options={"effort": "none", "numerics": numerics, "db": db})
    x, y = batches(1)[0]
    cross_entropy(compiled(x), y).backward()
    assert [graph.plan is not None and graph.plan.baseline is not is_right for graph in made] == [True, True]


def test_nothing_is_run_where_pytorchs_own_error_or_exact_products_decide() -> None:
    def rounded() -> OutputErrors:
        pytest.fail("it was run")

    far, own = OutputErrors(1e-3, 0.0), OutputErrors(1e-7, 0.0)
    assert allowed_baseline(OutputErrors(3e-7, 0.0), own, "as_torch", TF32_ROUNDING, rounded) is own
    assert allowed_baseline(far, own, "strict", TF32_ROUNDING, rounded) is own
    assert allowed_baseline(far, own, "as_torch", FP32_UNIT, rounded) is own


def test_the_larger_of_both_counts_and_a_full_device_leaves_pytorchs_own() -> None:
    def full() -> OutputErrors:
        raise torch.OutOfMemoryError("CUDA out of memory")

    far, own = OutputErrors(0.1, 0.0), OutputErrors(1e-4, 0.0)
    for rounded, wanted in [(OutputErrors(1e-3, 0.0), 1e-3), (OutputErrors(1e-5, 0.0), 1e-4)]:
        found = allowed_baseline(far, own, "as_torch", TF32_ROUNDING, lambda found=rounded: found)
        assert found.rel_l2_error == wanted
    assert allowed_baseline(far, own, "as_torch", TF32_ROUNDING, full) is own
