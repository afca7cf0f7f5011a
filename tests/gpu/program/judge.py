"""Judge: training steps held to float64, each parameter by itself. Not a test module.

A norm over all weights does not see that one small parameter gets no gradient, or one that is a tenth too small. Nor does a bound
on how far two trainings drift apart: where a rounding moves a value over a ReLU's kink, gradients change by some percent. So
every step is compared with what float64 makes of the very same weights, and drift does not add up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import cross_entropy

MOST = 3.0
"""Times PyTorch's own error against float64 that a gradient may have. Two roundings of one precision (TF32 by nearest and by
truncation, bf16 and fp16 with and without a shake of the weights) differed by less than 1.5, on the net of `test_step.py`."""

FLOOR = 5e-3
"""Relative error that is always allowed: where PyTorch's own is tiny, as of a last layer that it computes in fp32."""

SHARE = 0.05
"""How far the part of float64's gradient that is in another may be from one. Over eight steps of eight small images, noise moves
it by 0.005 in TF32 and by 0.025 in bf16; a gradient that is missing moves it by 1, and one that is a tenth too small by 0.1."""

LOSS = 1e-3
"""Relative error that a loss may always have."""

SAME = 1e-3
"""Relative difference of what the same gradients make of the same weights in two forms of one optimizer. Besides, each step may
round every weight otherwise: where weights are large and their updates small, as of a batch norm under clipping, that is more."""

Batch = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Values:
    """One tensor's values and the right ones, step by step, flat.

    Attributes:
        ours: what was found.
        exact: in float64.
        stock: as PyTorch computes it.
    """

    ours: list[torch.Tensor] = field(default_factory=list)
    exact: list[torch.Tensor] = field(default_factory=list)
    stock: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Made:
    """What a twin's step made: its loss, its gradients and what it added to the running statistics."""

    loss: float
    gradients: list[torch.Tensor]
    statistics: list[torch.Tensor]


class Judge:
    """Follows a model's training and says what is wrong with it.

    Gradients and running statistics are held to float64's, computed from the same weights and batch, and their errors to those
    of PyTorch's own step. Updates are held to those of an optimizer of PyTorch's that is given the same gradients.

    Args:
        model: what is trained; its parameters' `.grad` are, after a step, what the optimizer was given.
        optimizer: makes an optimizer like the model's.
        loss_fn: (output, *targets) → one number.
        amp: dtype of autocast, or None.
        clip: largest joint L2 norm of the gradients; every step's must be above it, else nothing is clipped.
        scaler: the gradient scaler, or None.

    Attributes:
        optimizer: the one that is given the same gradients: schedules go through both.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        loss_fn: Callable[..., torch.Tensor] = cross_entropy,
        *,
        amp: torch.dtype | None = None,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._model, self._loss_fn, self._amp, self._clip, self._scaler = model, loss_fn, amp, clip, scaler
        self._stock, self._shadow = copy.deepcopy(model), copy.deepcopy(model)
        # In nchw: PyTorch has float64 kernels for channels_last that are wrong (`convoy.engines.interpret` names one).
        self._exact = copy.deepcopy(model).double().to(memory_format=torch.contiguous_format)
        self._start = [p.detach().clone() for p in model.parameters()]
        self.optimizer = optimizer(self._shadow)
        self._values: dict[str, Values] = {}
        self._losses: list[tuple[float, Made, Made]] = []
        self._norms: list[float] = []

    @contextmanager
    def step(self, *batches: Batch) -> Iterator[list[torch.Tensor]]:
        """One update, made inside: of one batch, or of several whose gradients are averaged. The losses go into the list."""
        before = {name: value.detach().clone() for name, value in self._model.state_dict().items()}
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        losses: list[torch.Tensor] = []
        yield losses
        ours = Made(
            sum(loss.item() for loss in losses) / len(batches),
            [self._gradient(p) for p in self._model.parameters()],
            _change(before, self._model),
        )
        exact = self._run(self._exact, before, [tuple(_wide(t) for t in batch) for batch in batches])
        stock = self._run(self._stock, before, batches, amp=self._amp, scale=scale)
        names = [name for name, _ in self._model.named_parameters()]
        names += [name for name, value in self._model.named_buffers() if value.is_floating_point()]
        made = ([*one.gradients, *one.statistics] for one in (ours, exact, stock))
        for name, *found in zip(names, *made, strict=True):
            values = self._values.setdefault(name, Values())
            for kept, tensor in zip((values.ours, values.exact, values.stock), found, strict=True):
                kept.append(tensor.reshape(-1))
        self._losses.append((ours.loss, exact, stock))
        for shadow, parameter in zip(self._shadow.parameters(), self._model.parameters(), strict=True):
            shadow.grad = self._gradient(parameter)
        self.optimizer.step()

    @torch.no_grad()
    def check(self, average: Callable[[torch.Tensor], None] | None = None) -> None:
        """Raise an AssertionError that names what is not as it should be; `average` puts processes' means into a tensor."""
        assert self._values, "no step was made"
        if self._clip is not None:
            assert min(self._norms) > self._clip, f"norms of {self._norms} leave nothing to clip"
        for ours, exact, stock in self._losses:
            allowed = MOST * abs(stock.loss - exact.loss) + LOSS * abs(exact.loss)
            assert abs(ours - exact.loss) <= allowed, f"the loss is {ours}, by float64 {exact.loss}"
        for name, values in self._values.items():
            if average is not None and name in dict(self._model.named_parameters()):
                for tensor in (*values.exact, *values.stock):
                    average(tensor)
            _check(name, *(torch.cat(kept).double() for kept in (values.ours, values.exact, values.stock)))
        ends = zip(self._model.named_parameters(), self._shadow.parameters(), self._start, strict=True)
        for (name, found), wanted, start in ends:
            off, moved = float((found - wanted).norm()), float((wanted - start).norm())
            assert moved > 0, f"{name} has not moved"
            rounding = len(self._losses) * torch.finfo(found.dtype).eps / 2 * float(wanted.norm())
            assert off <= SAME * moved + rounding, (
                f"{name}: its updates are off by {off / moved:.1e} of what they moved it"
            )

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()

    def _run(
        self,
        twin: nn.Module,
        before: dict[str, torch.Tensor],
        batches: Sequence[Batch],
        *,
        amp: torch.dtype | None = None,
        scale: float = 1.0,
    ) -> Made:
        """The results of a copy of the model with the same weights, statistics and batches."""
        twin.load_state_dict(before)
        twin.zero_grad()
        total = 0.0
        for x, *targets in batches:
            with torch.autocast(x.device.type, amp or torch.bfloat16, enabled=amp is not None):
                loss = self._loss_fn(twin(x), *targets) / len(batches)
            (loss * scale).backward()
            total += loss.item()
        learned = list(twin.parameters())
        for parameter in learned:
            assert parameter.grad is not None
            parameter.grad /= scale
        if self._clip is not None:
            self._norms.append(float(nn.utils.clip_grad_norm_(learned, self._clip)))
        return Made(total, [self._gradient(p) for p in learned], _change(before, twin))


def _change(before: dict[str, torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    """The amount that a step added to the buffers that hold floating-point numbers; its counters must have gone up."""
    found: list[torch.Tensor] = []
    for name, value in model.named_buffers():
        if value.is_floating_point():
            found.append(value.detach() - before[name])
        else:
            assert bool((value > before[name]).all()), f"{name} was not counted up"
    return found


def _check(name: str, ours: torch.Tensor, exact: torch.Tensor, stock: torch.Tensor) -> None:
    """Hold one tensor's values, of all steps one behind the other, to float64's."""
    norm = exact.norm()
    error, own = float((ours - exact).norm() / norm), float((stock - exact).norm() / norm)
    assert error <= MOST * own + FLOOR, f"{name}: its error is {error:.1e}, that of PyTorch's own {own:.1e}"
    share = float(ours @ exact / (exact @ exact))
    assert abs(share - 1) <= SHARE, f"{name}: there is {share:.3f} times of what float64 has"


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Numbers in float64 and nchw; labels as they are."""
    return value.double().contiguous() if value.is_floating_point() else value
