"""Loss and gradients as PyTorch computes them, and the check of a tuned step against them: is it right, is it faster?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.capture import TrainingCapture
from convoy.capture.copies import copy_module
from convoy.capture.joint import LossModule
from convoy.engines.flags import convolutions
from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline import verdict
from convoy.pipeline.check import Check, Side
from convoy.pipeline.rounding import Shaker, seeded, unit_roundoff
from convoy.program import Program
from convoy.program.graph import GraphProgram


class StockStep:
    """Loss and gradients as PyTorch computes them, on a copy of the model."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        amp: torch.dtype | None,
        batch: tuple[Any, ...],
        *,
        scaled: bool,
    ) -> None:
        self._module = LossModule(copy_module(model), loss_fn, amp, scaled=scaled)
        self._batch = batch

    def run(self) -> list[torch.Tensor]:
        """The loss, then the gradients of the parameters that have one."""
        learned = [parameter for parameter in self._module.model.parameters() if parameter.requires_grad]
        made = self._module(*self._batch)
        return [made[-1].detach(), *torch.autograd.grad(made[0], learned)]

    def exact(self) -> list[torch.Tensor]:
        """The same in float64, without autocast; in nchw, for PyTorch has kernels for channels_last that are wrong.

        (`convoy.engines.interpret` names one.) A stock step that runs them is then as far off as it is.
        """
        wide = copy_module(self._module).double().to(memory_format=torch.contiguous_format)
        wide.amp = None
        twin = StockStep.__new__(StockStep)
        twin._module = wide
        twin._batch = pytree.tree_map(_wide, self._batch)
        return twin.run()

    def shaken(self) -> list[torch.Tensor]:
        """The same from parameters, buffers and a batch that are off by one rounding each (`convoy.pipeline.rounding`)."""
        module = copy_module(self._module)
        held = [*module.parameters(), *module.buffers()]
        leaves, spec = pytree.tree_flatten(self._batch)
        dtypes = [*(t.dtype for t in held), *([self._module.amp] if self._module.amp else [])]
        shake = Shaker(unit_roundoff(dtypes, cuda=held[0].is_cuda))
        with torch.no_grad():
            for tensor in held:
                tensor.copy_(shake(tensor))
        twin = StockStep.__new__(StockStep)
        twin._module = module
        twin._batch = pytree.tree_unflatten([shake(t) if isinstance(t, torch.Tensor) else t for t in leaves], spec)
        return twin.run()

    def captured(self) -> Callable[[], object]:
        """Loss and gradients as one CUDA graph on one stream: the baseline on a GPU."""
        return verdict.capture_stock(self.run, reads=self)


def _wide(value: Any) -> Any:
    """A tensor of numbers in float64 and nchw; anything else as it is."""
    return value.double().contiguous() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _seeded(run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    with seeded():
        return run()


def _why_not_exact(capture: TrainingCapture, flops: int, *, cuda: bool) -> str:
    """Why the step cannot be held to float64; empty where it can."""
    if capture.random:
        return "draws random numbers"
    return "" if cuda or flops <= verdict.ORACLE_FLOPS else "takes too long in float64 here"


def _reference(stock: StockStep, why: str) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    """What to compare with, PyTorch's own step or what stands for its error, and a note; empty where the first is float64."""
    if not why:
        try:
            return stock.exact(), _seeded(stock.run), ""
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            torch.cuda.empty_cache()
            why = "does not fit in float64"
    note = (
        f"the step {why}: its gradients were compared with PyTorch's own and not with float64, and may be as far off as"
        f" {verdict.WORST_ERROR:g} times what one rounding of every parameter changes there"
    )
    return [t.double() for t in _seeded(stock.run)], _seeded(stock.shaken), note


class StepCheck(Check):
    """Loss and gradients of stock step and program; the user's model is not touched.

    cuDNN searches from PyTorch's first step on: the first plan of a convolution that is found is kept. Where there is no float64
    run, the baseline's error is what rounding alone does to PyTorch's own step.

    Args:
        stock: PyTorch's step.
        inputs: parameters, buffers and batch.
        capture: what the program's outputs are.
        flops: operations of the step: where float64 would take too long on a CPU, PyTorch's own step is compared with.

    Attributes:
        note: what was compared with; empty where it was float64.
    """

    def __init__(
        self, stock: StockStep, inputs: Sequence[torch.Tensor], capture: TrainingCapture, *, flops: int
    ) -> None:
        self.cuda = inputs[0].is_cuda
        self._stock, self._inputs, self._results = stock, inputs, 1 + len(capture.learned)
        with self.context():
            self._exact, theirs, self.note = _reference(stock, _why_not_exact(capture, flops, cuda=self.cuda))
            self._baseline_errors = verdict.errors_against(theirs, self._exact)

    def context(self) -> AbstractContextManager[None]:
        """Convolutions as PyTorch runs them."""
        return convolutions("as_torch", self._inputs[0].device)

    def stock(self) -> Side:
        """PyTorch's step: on a GPU as one graph, where it can be captured."""
        runs: dict[str, Callable[[], object]] = {"torch.eager": self._stock.run}
        if self.cuda:
            runs = verdict.baseline_run(self._stock.run, self._stock.captured)
        ((name, run),) = runs.items()
        return Side(name, self._baseline_errors, run)

    def ours(self, program: Program) -> Side:
        """The program: as one graph without the copies of inputs and outputs."""
        runnable = program.runnable
        assert runnable is not None

        def run() -> list[torch.Tensor]:
            with torch.no_grad():
                return runnable(self._inputs)[: self._results]

        errors = verdict.errors_against(_seeded(run), self._exact)
        return Side("convoy", errors, runnable.replay if isinstance(runnable, GraphProgram) else run)
