"""What a provider of data-parallel training trains: the net, a batch, the loss, the optimizer; and what it gives: its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from convoy.compare.scaling.scaling_clocks import Step
from convoy.compare.scaling.scaling_jobs import BF16_SENT
from convoy.narrowing import is_list
from convoy.typed_torch import in_memory_format
from convoy.zoo import example_args, load_model, preprocessing
from convoy.zoo.model_names import is_exported

Stage = Callable[[str], None]

AUXILIARY: Final = 0.3
"""Weight of the auxiliary classifiers of GoogLeNet and Inception in the loss, as their authors have it."""


@dataclass(slots=True)
class ProviderSteps:
    """The steps of a provider.

    Attributes:
        steps: by name: `step`, all-reduce included; `compute`, without; `input`, with the batch copied from the host.
        setting: how the provider is set, in words.
        peak_bytes: most that PyTorch held on the GPU during some steps, model and batch included; None on a CPU.
        notes: lines for people.
        sent_bytes: bytes of gradients whose all-reduce sends as much as a step; None: those of the setup.
    """

    steps: dict[str, Step]
    setting: str
    peak_bytes: float | None
    notes: list[str] = field(default_factory=list[str])
    sent_bytes: float | None = None


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the logits, and of the auxiliary ones where the net has any."""
    if isinstance(output, torch.Tensor):
        return functional.cross_entropy(output, target)
    logits, *others = [part for part in output if isinstance(part, torch.Tensor)]
    loss = functional.cross_entropy(logits, target)
    for other in others:
        loss = loss + AUXILIARY * functional.cross_entropy(other, target)
    return loss


@dataclass(slots=True)
class TrainingSetup:
    """The net and a batch, on the device and on the host."""

    model: nn.Module
    x: torch.Tensor
    target: torch.Tensor
    host_x: torch.Tensor
    device: torch.device
    amp: torch.dtype | None
    gradients: str | None = None

    @staticmethod
    def of(request: Mapping[str, Any], batch: int, device: torch.device, gradients: str | None = None) -> TrainingSetup:
        """Make a request's model and batch on a device; `gradients` says how they are sent (`scaling_jobs.GRADIENTS`)."""
        name = request["model"]
        model = in_memory_format(load_model(name, trust=request["trust"]).to(device), torch.channels_last)
        wanted, given = preprocessing(name), request["size"]
        size: Any = tuple(given) if is_list(given) else given or None  # JSON has no tuples
        args = example_args(model, batch=batch, size=size, default_size=wanted.size)
        host = args[0].contiguous(memory_format=torch.channels_last)
        if device.type == "cuda":
            host = host.pin_memory()
        x = host.to(device)
        with torch.no_grad():
            outputs: Any = model(x if is_exported(name) else x[:1])  # a program may take its own batch alone
        logits: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        classes = logits.shape[-1]
        target = torch.arange(batch, device=device) % classes
        amp = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(request["dtype"])
        return TrainingSetup(model.train(), x, target, host, device, amp, gradients)

    @property
    def gradient_bytes(self) -> int:
        """Bytes that each step sends."""
        found = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        return found // 2 if self.gradients in BF16_SENT else found  # parameters are fp32

    def optimizer(self) -> torch.optim.Optimizer:
        """SGD with momentum, as nets of images are trained; one fused kernel on a GPU."""
        fused = True if self.device.type == "cuda" else None
        return torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9, weight_decay=1e-4, fused=fused)

    def scaler(self) -> torch.amp.GradScaler | None:
        """One that scales the loss of fp16."""
        return torch.amp.GradScaler(self.device.type) if self.amp is torch.float16 else None

    def refill(self) -> None:
        """Copy the batch from the host, as a loader that is never late would."""
        self.x.copy_(self.host_x, non_blocking=True)
