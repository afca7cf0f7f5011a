"""Loss and gradients as PyTorch computes them, and the check of a tuned step against them: is it right, is it faster?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.capture import TrainingCapture, captured_function, to_double
from convoy.capture.copies import separate_copy
from convoy.capture.loss_module import LossModule
from convoy.capture.step_tensors import LIFTED, StepTensors
from convoy.capture.tensor_substitution import TensorSubstitution
from convoy.engines.group_norm_backward import guarded
from convoy.engines.torch_flags import convolutions
from convoy.engines.torch_operators import DTYPES
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.end_to_end import OutputErrors
from convoy.pipeline.check.end_to_end_check import ComparedRun, EndToEndCheck
from convoy.pipeline.check.net_oracle import MOST_ROUNDINGS, searched_if_needed, stock_error_message
from convoy.pipeline.check.rounding import InputPerturbation, unit_roundoff
from convoy.pipeline.check.rounding_bound import allowed_baseline
from convoy.pipeline.check.stock_graph import baseline_run, capture_stock
from convoy.program import Program
from convoy.program.cuda.cuda_graph import CudaGraphProgram
from convoy.training.step_reference import reference, seeded, why_not_exact
from convoy.typed_torch import in_memory_format

LEAST_SUSPICIOUS: Final = 1e-3
"""Relative error of gradients that is never looked into: behind batch norms, sums that cancel magnify rounding."""


class StockStep:
    """Loss and gradients as PyTorch computes them, on a copy of the model and of what the step changes besides.

    Args:
        model: not changed.
        loss_fn: (output, *targets) → one number.
        amp: dtype of autocast, or None.
        batch: (x, *targets).
        scaled: whether the batch's last entry is a factor of the loss.
        capture: the step as it was captured: which tensors code holds, and which parameters get a gradient. None: no tensor,
            and all that require one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        amp: torch.dtype | None,
        batch: tuple[Any, ...],
        *,
        scaled: bool,
        capture: TrainingCapture | None = None,
    ) -> None:
        original = LossModule(model, loss_fn, amp, scaled=scaled)
        lifted = capture.lifted if capture else ()
        self._batch, self._capture = batch, capture
        self._module = original.rebuilt(separate_copy)
        self._lifted = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in lifted]
        # Code that holds tensors of its own is handed the copies of those alone that the step learns or changes.
        named, copies = StepTensors(original, lifted).all(), StepTensors(self._module, self._lifted).all()
        touched = {name for name in named if not name.startswith(LIFTED)}
        touched |= {*capture.learned, *capture.updated, *capture.counted} if capture else set()
        reached = capture.reached if capture else ()
        self._originals = {name: named[name] for name in reached}
        self._stand_ins = {id(named[name]): copies[name] for name in reached if name in touched}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The copies that a run reads and changes, by name: parameters, buffers, and tensors that code holds."""
        return StepTensors(self._module, self._lifted).all()

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The module's outputs with its loss; the last one is the loss, without a scaler's factor."""
        with torch.enable_grad(), TensorSubstitution(self._stand_ins) if self._stand_ins else nullcontext():
            return self._module(*self._batch)

    def run(self) -> list[torch.Tensor]:
        """The loss, then the gradients of the parameters that have one."""
        learning = StepTensors(self._module, self._lifted).learning
        learned = [learning[name] for name in (self._capture.learned if self._capture else learning)]
        made = self.forward()
        graph = self._capture.captured.as_pytorch if self._capture else None
        with guarded(graph, made[0].device.type):
            return [made[-1].detach(), *torch.autograd.grad(made[0], learned)]

    def exact(self) -> list[torch.Tensor]:
        """The same in float64, without autocast; in nchw, for PyTorch has kernels for channels_last that are wrong.

        (`convoy.engines.interpret` names one.) A stock step that runs them is then as far off as it is.
        """
        wide = in_memory_format(self._module.rebuilt(_own_copy).double(), torch.contiguous_format)
        wide.amp = None
        lifted = [_wide(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in self._lifted]
        return self._with_tensors(wide, lifted, pytree.tree_map(_wide, self._batch)).run()

    @property
    def unit(self) -> float:
        """The unit roundoff of the step's products, by the dtypes of its tensors and of autocast."""
        return self._unit_with([])

    @property
    def unit_of_all(self) -> float:
        """The unit roundoff of all that the step computes: of its forward's own casts to narrower types too."""
        values = self._capture.captured.graph.values.values() if self._capture else ()
        return self._unit_with([DTYPES[value.spec.dtype] for value in values])

    def _unit_with(self, dtypes: list[torch.dtype]) -> float:
        held = list(self.tensors.values())
        found = [*dtypes, *(t.dtype for t in held), *([self._module.amp] if self._module.amp else [])]
        return unit_roundoff(found, cuda=held[0].is_cuda)

    def shaken(self) -> list[torch.Tensor]:
        """The same from parameters, buffers and a batch that are off by one rounding each (`convoy.pipeline.check.rounding`)."""
        module = self._module.rebuilt(_own_copy)
        lifted = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self._lifted]
        held = list(StepTensors(module, lifted).all().values())
        leaves, spec = pytree.tree_flatten(self._batch)
        shake = InputPerturbation(self.unit_of_all)
        with torch.no_grad():
            for tensor in held:
                tensor.copy_(shake(tensor))
        batch = pytree.tree_unflatten([shake(t) if isinstance(t, torch.Tensor) else t for t in leaves], spec)
        return self._with_tensors(module, lifted, batch).run()

    def _with_tensors(self, module: LossModule, lifted: Sequence[torch.Tensor], batch: tuple[Any, ...]) -> StockStep:
        """The same step with other tensors; code that reads a tensor by itself is handed them too (`TensorSubstitution`)."""
        step = StockStep.__new__(StockStep)
        step._module, step._lifted, step._batch, step._capture = module, list(lifted), batch, self._capture
        step._originals = self._originals
        step._stand_ins = {id(tensor): step.tensors[name] for name, tensor in self._originals.items()}
        return step

    def captured(self) -> Callable[[], object]:
        """Loss and gradients as one CUDA graph on one stream: the baseline on a GPU."""
        return capture_stock(self.run, reads=self)


def _own_copy(module: nn.Module) -> nn.Module:
    """A copy with parameters of its own, which may be written to."""
    return separate_copy(module, share_parameters=False)


def _wide(value: Any) -> Any:
    """A tensor of numbers in float64 and nchw; anything else as it is."""
    return value.double().contiguous() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class StepCheck(EndToEndCheck):
    """Loss and gradients of stock step and program; the user's model is not touched.

    cuDNN searches from PyTorch's first step on: the first plan of a convolution that is found is kept. Where there is no float64
    run, the baseline's error is what rounding alone does to PyTorch's own step.

    Args:
        stock: PyTorch's step.
        inputs: parameters, buffers and batch.
        capture: what the program's outputs are.
        flops: operations of the step: where float64 would take too long on a CPU, PyTorch's own step is compared with.

    Attributes:
        baseline_errors: errors of PyTorch's own loss and gradients.
        note: what was compared with; empty where it was float64.
        wrong: what to tell the user of PyTorch's own loss and gradients; empty where they are right, or nobody can tell.
    """

    def __init__(
        self, stock: StockStep, inputs: Sequence[torch.Tensor], capture: TrainingCapture, *, flops: int
    ) -> None:
        self.cuda = inputs[0].is_cuda
        self.warm = not self.cuda  # the reference runs the stock step, and `ours` the program
        self._stock, self._inputs, self._results = stock, inputs, 1 + len(capture.learned)
        with self.context():
            why = why_not_exact(capture, flops, cuda=self.cuda)
            self._exact, theirs, self.note = reference(
                why,
                stock,
                searched_if_needed(stock.exact, inputs[0].device),
                searched_if_needed(lambda: self._by_graph(capture), inputs[0].device),
            )
            errors = end_to_end.errors_against(theirs, self._exact)
            self.baseline_errors, self.wrong = (errors, "") if self.note else self._looked_into(errors, theirs)

    def _by_graph(self, capture: TrainingCapture) -> list[torch.Tensor]:
        """Loss and gradients by the captured step in float64."""
        return list(captured_function(to_double(capture.captured))(*self._inputs))[: self._results]

    def _looked_into(self, errors: OutputErrors, theirs: list[torch.Tensor]) -> tuple[OutputErrors, str]:
        """PyTorch's errors, or where they are larger than rounding explains what it does explain, and what to tell the user."""
        if errors.rel_l2_error <= LEAST_SUSPICIOUS:
            return errors, ""
        unit = self._stock.unit_of_all
        if errors.rel_l2_error <= MOST_ROUNDINGS * unit:
            return errors, ""
        explained = self._rounded(theirs)
        if errors.rel_l2_error <= MOST_ROUNDINGS * max(explained.rel_l2_error, unit):
            return errors, ""
        return explained, stock_error_message("loss and gradients", errors, explained, cuda=self.cuda)

    def _rounded(self, theirs: list[torch.Tensor]) -> OutputErrors:
        """What one rounding of every parameter, buffer and number of the batch changes in PyTorch's own step."""
        return end_to_end.errors_against(seeded(self._stock.shaken), [tensor.double() for tensor in theirs])

    def allowed(self, errors: OutputErrors, baseline: OutputErrors, numerics: str) -> OutputErrors:
        """The errors that a program's loss and gradients are to be compared with (`rounding_bound.allowed_baseline`).

        Args:
            errors: of the program's loss and gradients.
            baseline: of PyTorch's own.
            numerics: the rounding that the user allows.
        """

        def rounded() -> OutputErrors:
            with self.context():
                return self._rounded(seeded(self._stock.run))

        return allowed_baseline(errors, baseline, numerics, self._stock.unit, rounded)

    def context(self) -> AbstractContextManager[object]:
        """Convolutions as PyTorch runs them."""
        return convolutions("as_torch", self._inputs[0].device)

    def stock(self) -> ComparedRun:
        """PyTorch's step: on a GPU as one graph, where it can be captured."""
        runs: dict[str, Callable[[], object]] = {"torch.eager": self._stock.run}
        if self.cuda:
            runs = baseline_run(self._stock.run, self._stock.captured)
        ((name, run),) = runs.items()
        return ComparedRun(name, self.baseline_errors, run)

    def ours(self, program: Program) -> ComparedRun:
        """The program: as one graph without the copies of inputs and outputs."""
        runnable = program.runnable
        assert runnable is not None

        def run() -> list[torch.Tensor]:
            with torch.no_grad():
                return runnable(self._inputs)[: self._results]

        errors = end_to_end.errors_against(seeded(run), self._exact)
        return ComparedRun("convoy", errors, runnable.replay if isinstance(runnable, CudaGraphProgram) else run)
