"""The references of a tuned step's check: PyTorch's step in float64, or PyTorch's own step where float64 cannot run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from convoy.capture import TrainingCapture
from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline.check import end_to_end, float64
from convoy.pipeline.check.rounding import fixed_seed


class RepeatableStep(Protocol):
    """PyTorch's step (`convoy.training.stock_step.StockStep`)."""

    @property
    def unit(self) -> float:
        """The unit roundoff of the step's products."""
        ...

    @property
    def unit_of_all(self) -> float:
        """The unit roundoff of all that the step computes."""
        ...

    def run(self) -> list[torch.Tensor]:
        """The loss, then the gradients."""
        ...

    def shaken(self) -> list[torch.Tensor]:
        """The same from parameters, buffers and a batch that are off by one rounding each."""
        ...


def seeded(run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Run with a fixed seed: all such runs draw the same random numbers."""
    with fixed_seed():
        return run()


def why_not_exact(capture: TrainingCapture, flops: int, *, cuda: bool) -> str:
    """Why the step cannot be held to float64; empty where it can."""
    if capture.random:
        return "draws random numbers"
    return "" if cuda or flops <= float64.ORACLE_FLOPS else "takes too long in float64 here"


def reference(
    why: str,
    stock: RepeatableStep,
    of_module: Callable[[], list[torch.Tensor]],
    of_graph: Callable[[], list[torch.Tensor]],
) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    """Run both references: the exact results, and PyTorch's own or those that stand for its error. The note is empty for float64.

    Args:
        why: why there is no float64 run; empty where there is.
        stock: PyTorch's step.
        of_module: the step in float64.
        of_graph: the captured step in float64, for a model that casts: one that does so to fp32 does not run in float64, and one
            that does so to narrower types rounds there too.
    """
    if not why:
        if stock.unit_of_all > stock.unit:
            # The module's float64 run would do these casts too, and a value that they round the other way would be a fault.
            exact = _agreeing(stock, of_graph)
            if exact is not None:
                return exact, seeded(stock.run), ""
        try:
            return of_module(), seeded(stock.run), ""
        except Exception as error:  # everything: the user's code runs in a dtype that it may not have been written for
            if is_out_of_memory(error):
                torch.cuda.empty_cache()
                why = "does not fit in float64"
            else:
                why = f"does not run in float64 ({type(error).__name__})"
                exact = _agreeing(stock, of_graph)
                if exact is not None:
                    return exact, seeded(stock.run), ""
    note = (
        f"the step {why}: its gradients were compared with PyTorch's own and not with float64, and may be as far off as"
        f" {end_to_end.WORST_ERROR:g} times what one rounding of every parameter changes there"
    )
    return [t.double() for t in seeded(stock.run)], seeded(stock.shaken), note


def _agreeing(stock: RepeatableStep, of_graph: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor] | None:
    """The captured step in float64, where PyTorch's own is no farther from it than rounding takes it; a wrong graph is not."""
    try:
        exact = of_graph()
        own = seeded(stock.run)
        rounding = end_to_end.errors_against(seeded(stock.shaken), [t.double() for t in own])
        found = end_to_end.errors_against(own, exact)
    except Exception:  # everything: no float64 kernel, no memory for it, or the user's code fails
        torch.cuda.empty_cache()
        return None
    return None if end_to_end.why_wrong("", found, rounding, end_to_end.LEAST_ERROR) else exact
