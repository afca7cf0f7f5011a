"""Shared by the frameworks that are built on PyTorch: the model with its input, a training step, a profile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from convoy.compare.case import LEARNING_RATE, MOMENTUM, Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, Outputs, UnsupportedCaseError
from convoy.compare.layer_kinds import by_kind
from convoy.measurement.device.heap import keep_freed_memory
from convoy.pipeline.check.end_to_end import float_outputs
from convoy.typed_torch import backward, from_numpy, in_memory_format
from convoy.zoo import load_model, parse_dtype
from convoy.zoo.model_names import is_exported

FORMATS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}

PROFILED_CALLS = 3


@dataclass(slots=True)
class FrameworkNet:
    """A model on its device with its inputs: x [n, c, h, w] and labels [n]."""

    model: nn.Module
    x: torch.Tensor
    labels: torch.Tensor


def load_net(case: Case, material: CaseInputs, layout: str = "nchw", *, keep_memory: bool = True) -> FrameworkNet:
    """The case's model with the material's weights, in evaluation or (without dropout) training mode.

    On a CPU the C library is told to keep freed memory, as PyTorch's tuning guide does it with another allocator, unless
    `keep_memory` is false.
    """
    if case.device == "cpu":
        if keep_memory:
            keep_freed_memory()
        torch.set_num_threads(case.threads)
    own = is_exported(case.model)
    dtype = "fp32" if case.training else case.dtype
    weights = case.weights if case.weights == "DEFAULT" else str(material.weights_path)
    model = load_model(case.model, weights=None if own else weights, dtype=dtype, trust=case.trust)
    model = model.to(case.device)
    x = from_numpy(material.input()).to(case.device, parse_dtype(dtype))
    labels = from_numpy(material.labels()).to(case.device)
    if layout != "nchw":
        model = in_memory_format(model, FORMATS[layout])
        x = x.contiguous(memory_format=FORMATS[layout])
    if case.training:
        train_without_dropout(model)
    return FrameworkNet(model, x, labels)


def train_without_dropout(model: nn.Module) -> None:
    """Training mode; dropout and stochastic depth off, because frameworks draw different random numbers."""
    model.train()
    for module in model.modules():
        for name in ("p", "drop_prob"):
            if "drop" in type(module).__name__.lower() or "stochastic" in type(module).__name__.lower():
                with contextlib.suppress(AttributeError):
                    getattr(module, name)
                    setattr(module, name, 0.0)


class FrameworkStep:
    """One SGD step: forward, loss, backward, update.

    Args:
        net: model in training mode, input, labels.
        case: its dtype is autocast's.
        forward: called instead of the model (a compiled one), if given.
        optimizer: further arguments of SGD; the fused one by default.
        set_to_none: drop gradients before the step, or fill them with zeros.
    """

    def __init__(
        self,
        net: FrameworkNet,
        case: Case,
        forward: Callable[..., Any] | None = None,
        *,
        optimizer: Mapping[str, Any] | None = None,
        set_to_none: bool = True,
    ) -> None:
        if case.dtype == "fp16" and case.device == "cpu":
            raise UnsupportedCaseError("training in fp16 on a CPU: PyTorch has no such autocast; use bf16")
        self.net, self.forward = net, net.model if forward is None else forward
        self.set_to_none = set_to_none
        chosen: dict[str, Any] = {"fused": True} if optimizer is None else dict(optimizer)
        trained = [parameter for parameter in net.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=MOMENTUM, **chosen)
        self.scaler = torch.amp.GradScaler(case.device, init_scale=2.0**10) if case.dtype == "fp16" else None
        self._autocast: dict[str, Any] = {
            "device_type": case.device,
            "dtype": parse_dtype(case.dtype) if case.dtype != "fp32" else torch.bfloat16,
            "enabled": case.dtype != "fp32",
            "cache_enabled": True,
        }

    def __call__(self) -> torch.Tensor:
        """Take the step; the loss before it."""
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        with torch.autocast(**self._autocast):
            outputs = self.forward(self.net.x)
            loss = functional.cross_entropy(float_outputs(outputs)[0].float(), self.net.labels)
        if self.scaler is None:
            backward(loss)
            cast("Any", self.optimizer).step()
        else:
            backward(self.scaler.scale(loss))
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def gradients(self) -> Outputs:
        """The first step's gradients: SGD's momentum after one step is nothing else."""
        found: Outputs = {}
        for name, parameter in self.net.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            if "momentum_buffer" in state:
                # A copy: the next step changes the buffer where it lies.
                found[f"grad:{name}"] = state["momentum_buffer"].detach().float().cpu().contiguous().numpy().copy()
        return found


def check_step(step: Callable[[], torch.Tensor], gradients: Callable[[], Outputs]) -> Outputs:
    """Take two steps: the loss before and after the first, and the gradients of the first."""
    loss0 = step().detach().double().cpu().numpy()
    found = gradients()
    return {"loss0": loss0, "loss1": step().detach().double().cpu().numpy(), **found}


def outputs_of(result: Any) -> Outputs:
    """A model's floating-point outputs as arrays."""
    return {f"out{i}": t.detach().float().cpu().numpy().copy() for i, t in enumerate(float_outputs(result))}


def set_flags(device: str) -> None:
    """PyTorch's flags for speed on a GPU: cuDNN tries all of its plans, and fp32 is TF32 in matrix products too."""
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.benchmark_limit = 0  # all plans; PyTorch tries ten by default


def built(
    run: Callable[[], object],
    check: Callable[[], Outputs],
    case: Case,
    *,
    replay: Callable[[], object] | None = None,
    notes: tuple[str, ...] = (),
) -> BuiltModel:
    """A `BuiltModel` with PyTorch's own way to wait, to count memory and to profile."""
    cuda = case.device == "cuda"
    return BuiltModel(
        run=run,
        check=check,
        wait=torch.cuda.synchronize if cuda else None,
        replay=replay,
        peak_memory=peak_memory if cuda else None,
        restart_peak=restart_peak if cuda else None,
        kinds=lambda: profile(run, cuda=cuda),
        notes=list(notes),
    )


def restart_peak() -> None:
    """Free unused memory, and count the peak from here."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    """Most bytes since `restart_peak`: allocated bytes of calls that allocate; the pool of a captured graph.

    A graph's replay allocates nothing: what it works in is reserved from when it was captured. The cache is emptied first, so
    that only what is held counts as reserved.
    """
    allocated = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    return max(allocated, torch.cuda.memory_reserved())


def profile(run: Callable[[], object], *, cuda: bool) -> dict[str, float]:
    """Milliseconds of one call by layer kind, from torch.profiler (itself a burden of some microseconds an operator)."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profiler(activities=activities) as found:
        for _ in range(PROFILED_CALLS):
            run()
        if cuda:
            torch.cuda.synchronize()
    events: Iterable[Any] = cast("Any", found).key_averages()
    if cuda:
        device = [e for e in events if str(e.device_type).endswith("CUDA")]
        pairs = [(e.key, e.self_device_time_total) for e in device]
    else:
        pairs = [(e.key, e.self_cpu_time_total) for e in events]
    return by_kind((name, us / 1e3 / PROFILED_CALLS) for name, us in pairs)
