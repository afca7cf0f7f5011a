"""Providers of data-parallel training: PyTorch's DistributedDataParallel, and Convoy's step in the same process group.

The learning rate is 0, so that parameters stay equal on all processes although some rounds leave the gradients apart: the kernels
are those of training.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from convoy.compare.scaling.scaling_clocks import Step, peak_bytes
from convoy.compare.scaling.scaling_jobs import BASELINE_KEPT
from convoy.errors import ConvoyError
from convoy.narrowing import is_list
from convoy.settings import Settings
from convoy.typed_torch import backward, in_memory_format
from convoy.zoo import example_args, load_model, preprocessing

Stage = Callable[[str], None]

_DDP_WORDS: Final = inspect.signature(DistributedDataParallel).parameters
BUFFERS_ARE_SENT: Final = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_WORDS else "broadcast_buffers"
"""DDP's word for it: torch 2.13 has a new one."""

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
    """

    steps: dict[str, Step]
    setting: str
    peak_bytes: float | None
    notes: list[str] = field(default_factory=list[str])


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

    @staticmethod
    def of(request: Mapping[str, Any], batch: int, device: torch.device) -> TrainingSetup:
        """Make a request's model and batch on a device."""
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
            outputs: Any = model(x[:1])
        logits: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        classes = logits.shape[-1]
        target = torch.arange(batch, device=device) % classes
        amp = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(request["dtype"])
        return TrainingSetup(model.train(), x, target, host, device, amp)

    @property
    def gradient_bytes(self) -> int:
        """Bytes that each step sends."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

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


def _ddp(setup: TrainingSetup, request: Mapping[str, Any], stage: Stage) -> ProviderSteps:
    del request, stage
    devices = [setup.device] if setup.device.type == "cuda" else None
    # Statistics of batch norms stay each process's own, as in Convoy's step: sending them is no part of the gradients' way.
    options: dict[str, Any] = {BUFFERS_ARE_SENT: False}
    model = DistributedDataParallel(setup.model, device_ids=devices, gradient_as_bucket_view=True, **options)
    optimizer, scaler = setup.optimizer(), setup.scaler()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(setup.device.type, setup.amp or torch.bfloat16, enabled=setup.amp is not None):
            loss = loss_of(model(setup.x), setup.target)
        if scaler is None:
            backward(loss)
            optimizer.step()
            return
        backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()

    def alone() -> None:
        with model.no_sync():
            step()

    def fed() -> None:
        setup.refill()
        step()

    words = ["channels_last", "gradient_as_bucket_view", "buffers not broadcast"]
    words += ["cudnn.benchmark", "TF32", "fused SGD"] if setup.device.type == "cuda" else []
    words += [f"autocast {str(setup.amp).rpartition('.')[2]}"] if setup.amp else []
    return ProviderSteps(
        {"step": step, "compute": alone, "input": fed}, ", ".join(words), peak_bytes(step, setup.device)
    )


def _convoy(setup: TrainingSetup, request: Mapping[str, Any], stage: Stage) -> ProviderSteps:
    """Convoy's step in the process group, and the same plan without it."""
    import convoy

    settings = Settings(effort=request["effort"], db=Path(request["db"]) if request["db"] else None)
    devices = [setup.device] if setup.device.type == "cuda" else None
    batch = (setup.x, setup.target)
    common: dict[str, Any] = {
        "amp": setup.amp,
        "scaler": setup.scaler(),
        "settings": settings,
        "name": request["model"],
    }
    together = convoy.training_step(
        DistributedDataParallel(setup.model, device_ids=devices), loss_of, setup.optimizer(), batch, **common
    )
    steps: dict[str, Step] = {"step": lambda: together(*batch)}
    most = peak_bytes(steps["step"], setup.device)  # there is no second step yet, which has an arena of its own
    notes = together.notes  # its own list, which grows while it runs: where a step cannot be captured, it says so then
    stage("preparing convoy without all-reduce")
    try:
        with tempfile.TemporaryDirectory() as folder:
            together.save(Path(folder) / "plan.json")
            plan = Path(folder) / "plan.json"
            alone = convoy.training_step(setup.model, loss_of, setup.optimizer(), batch, plan=plan, **common)
        steps["compute"] = lambda: alone(*batch)
    except ConvoyError as error:
        notes.append(f"no time without all-reduce: {error}")

    def fed() -> None:
        setup.refill()
        together(*batch)

    setting = f"channels_last, training_step, effort {request['effort']}"
    setting += f", {BASELINE_KEPT}" if together.plan.baseline else ""
    return ProviderSteps({**steps, "input": fed}, setting, most, notes)


PROVIDERS: Final[dict[str, Callable[[TrainingSetup, Mapping[str, Any], Stage], ProviderSteps]]] = {
    "torch.ddp": _ddp,
    "convoy": _convoy,
}
"""By name: the function that prepares training."""
