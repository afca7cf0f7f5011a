"""One net, batch and precision of a training step: PyTorch's own steps, and whether losses are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy.program.cuda.recording import recording
from convoy.zoo import input_size, load_model

CHECKED = 5
"""Steps of the check, from the same weights: losses of chaotic nets drift apart after more."""

WARMUP = 3
"""Steps that are made before a capture: the first loss that a captured step shows is that of the step after them."""

FAR = {"fp32": 2e-2, "bf16": 5e-2}

WORSE = 3.0

NUDGES = 2
"""A step is right if each of these losses is within this relative difference of strict fp32's, or `WORSE` times as far off as
PyTorch's own were until then, or strict fp32's own in so many runs from weights and images that are one rounding off: nets with
random weights magnify rounding (AlexNet's fifth loss at batch 128 is 6 % off in bf16). How far those runs were off stands in the
row of `torch.eager`."""

ROUNDING = {("fp32", "cuda"): 2.0**-11, ("fp32", "cpu"): 2.0**-24, ("bf16", "cuda"): 2.0**-9, ("bf16", "cpu"): 2.0**-9}
"""The largest relative error of one rounding of a product's operands: fp32 on a GPU is TF32."""

LR = 1e-3

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One net, batch and precision."""

    net: str
    batch: int
    dtype: str
    device: str

    @property
    def amp(self) -> torch.dtype | None:
        """The dtype of autocast."""
        return torch.bfloat16 if self.dtype == "bf16" else None

    def model(self) -> nn.Module:
        """The model in training mode, dropout off: losses are compared."""
        model = load_model(self.net).train().to(self.device, memory_format=torch.channels_last)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of random images and labels."""
        size = input_size(self.net)
        side = size if isinstance(size, int) else size[-1]
        x = torch.randn(self.batch, 3, side, side, generator=torch.Generator().manual_seed(self.batch))
        x = x.to(self.device, memory_format=torch.channels_last)
        return x, (torch.arange(self.batch) % 10).to(self.device)


def loss_of(output: object, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the first output."""
    scores = output[0] if isinstance(output, tuple) else output
    assert isinstance(scores, torch.Tensor)
    return cross_entropy(scores, labels)


def optimizer_of(model: nn.Module, device: str) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum, fused where PyTorch has that."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=device == "cuda")


def nudged(tensor: torch.Tensor, most: float, seed: int) -> torch.Tensor:
    """A tensor whose values are off by a relative error of so much at most, drawn evenly."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    drawn = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype)
    return tensor * (1 + (2 * drawn - 1) * most)


def exact_losses(case: Case, nudge: int = 0) -> list[float]:
    """The losses of PyTorch's first steps in strict fp32: those of the check, and those that a captured step's come after.

    Args:
        case: the net, and the precision whose rounding a nudge is.
        nudge: the seed of weights and images one rounding off; 0: as they are.
    """
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        off = ROUNDING[case.dtype, case.device] if nudge else 0.0
        return first_losses(eager(dataclasses.replace(case, dtype="fp32"), nudge=(off, nudge)), CHECKED + WARMUP)
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def offsets(losses: Sequence[float], exact: Sequence[float]) -> list[float]:
    """Relative differences of losses."""
    return [abs(one / other - 1) for one, other in zip(losses, exact, strict=False)]


def is_right(
    losses: Sequence[float], rounded: Sequence[Sequence[float]], exact: Sequence[float], least: float, ahead: int = 0
) -> bool:
    """Whether losses are as near strict fp32's as rounding lets them be.

    Args:
        losses: of a provider, the first after `ahead` steps.
        rounded: PyTorch's own and nudged ones, from the first step on: how far any was off until a step is the measure there.
        exact: strict fp32's.
        least: a relative difference that is always allowed.
        ahead: steps that were made before.
    """
    farthest = (max(steps) for steps in zip(*(offsets(run, exact) for run in rounded), strict=True))
    until = list(accumulate(farthest, max))[ahead:]
    off = offsets(losses, exact[ahead:])
    return all(one <= max(least, WORSE * bound) for one, bound in zip(off, until, strict=False))


def eager(case: Case, mode: str = "", nudge: tuple[float, int] = (0.0, 0)) -> Step:
    """PyTorch's step, compiled in a mode where one is given; `nudge`: how far filters and images are off, and a seed."""
    model, (x, y) = case.model(), case.data()
    if nudge[0]:
        x = nudged(x, *nudge)
        with torch.no_grad():
            for place, weight in enumerate(w for w in model.parameters() if w.dim() > 1):
                weight.copy_(nudged(weight, nudge[0], nudge[1] + 1000 * place))
    optimizer = optimizer_of(model, case.device)
    if mode:
        torch._dynamo.reset()
    run = torch.compile(model, mode=mode) if mode else model

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(case.device, case.amp, enabled=case.amp is not None):
            loss = loss_of(run(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def graph(case: Case) -> Step:
    """PyTorch's step captured as one CUDA graph on one stream, with a workspace of cuBLAS's that nobody else's capture frees."""
    step = eager(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    captured = torch.cuda.CUDAGraph()
    with recording(captured, stream):
        loss = step()

    def replay(reads: Step = step) -> torch.Tensor:
        del reads  # held: the graph reads its model and its batch
        captured.replay()
        return loss

    return replay


def first_losses(step: Step, count: int = CHECKED) -> list[float]:
    """The losses of the first steps, from the net's own weights."""
    return [float(step()) for _ in range(count)]
