"""PyTorch's own data-parallel training: DistributedDataParallel, eager, or compiled by Inductor and captured as a CUDA graph."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from convoy.compare.scaling.scaling_clocks import Step, agreed, peak_bytes, wait
from convoy.compare.scaling.scaling_setup import ProviderSteps, Stage, TrainingSetup, loss_of
from convoy.errors import InputError
from convoy.program.cuda.recording import first_line, recording
from convoy.typed_torch import backward, torch_compile

_DDP_WORDS: Final = inspect.signature(DistributedDataParallel).parameters
BUFFERS_ARE_SENT: Final = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_WORDS else "broadcast_buffers"
"""DDP's word for it: torch 2.13 has a new one."""

DDP_WARM_UPS: Final = 11
"""Steps of a DistributedDataParallel before it can be captured (PyTorch's notes on CUDA graphs): it sorts its buckets in the
second step, and takes times by events in the first ten."""


def ddp(setup: TrainingSetup, request: Mapping[str, Any], stage: Stage) -> ProviderSteps:
    """PyTorch's DistributedDataParallel, eager."""
    del request, stage
    model = _wrapped(setup)
    steps = _steps(setup, model, model)
    return ProviderSteps(steps, ", ".join(_words(setup)), peak_bytes(steps["step"], setup.device))


def compiled_ddp(setup: TrainingSetup, request: Mapping[str, Any], stage: Stage) -> ProviderSteps:
    """DistributedDataParallel compiled by Inductor; on a GPU the step, all-reduces and update included, captured as a CUDA graph.

    Where it cannot be captured, it is launched kernel by kernel; the setting says so.
    """
    del request
    if setup.device.type != "cuda":
        model = _wrapped(setup)
        steps = _steps(setup, model, torch_compile(model))
        stage("compiling")
        steps["step"]()
        return ProviderSteps(steps, ", ".join(["torch.compile", *_words(setup)]), None)
    # DistributedDataParallel must be made on a stream beside the default one, and warmed up there, to be captured.
    stream = torch.cuda.Stream(setup.device)
    stream.wait_stream(torch.cuda.current_stream(setup.device))
    with torch.cuda.stream(stream):
        model = _wrapped(setup)
        steps = _steps(setup, model, torch_compile(model))
        stage("compiling")
        for _ in range(DDP_WARM_UPS):
            steps["step"]()
        steps["compute"]()
        peak = peak_bytes(steps["step"], setup.device)
    torch.cuda.current_stream(setup.device).wait_stream(stream)
    stage("capturing")
    captured, reason = _captured(setup, steps, stream)
    # All processes replay, or none does: a graph's all-reduces would wait for ever for those of a process that has none.
    failed = agreed(float(bool(reason)), setup.device)
    words = ["torch.compile", *_words(setup)]
    if not failed:
        words.insert(1, "one CUDA graph")
        return ProviderSteps(captured, ", ".join(words), peak)
    words.insert(1, "launched kernel by kernel")
    reason = reason or "another process could not capture it"
    return ProviderSteps(steps, ", ".join(words), peak, [f"the step could not be captured: {reason}"])


@dataclass(frozen=True, slots=True)
class Replay:
    """Replays a captured step. The step holds the model and the optimizer, whose buckets and momentum the graph addresses.

    Attributes:
        graph: the captured step.
        step: what was captured.
    """

    graph: torch.cuda.CUDAGraph
    step: Step

    def __call__(self) -> None:
        """Launch the graph."""
        self.graph.replay()


def _captured(
    setup: TrainingSetup, steps: Mapping[str, Step], stream: torch.cuda.Stream
) -> tuple[dict[str, Step], str]:
    """The steps as CUDA graphs, and why they could not be captured; empty where they could."""
    found: dict[str, Step] = {}
    kept = {name: steps[name] for name in ("step", "compute")}
    try:
        for name, step in kept.items():
            graph = torch.cuda.CUDAGraph()
            with recording(graph, stream):
                step()
            found[name] = Replay(graph, step)
        replay = found["step"]
    except Exception as error:  # whatever it is, it is told, and the step is launched kernel by kernel
        with contextlib.suppress(RuntimeError):
            wait(stream.device)
        return {}, f"{type(error).__name__}: {first_line(error)}"

    def fed() -> None:
        setup.refill()
        replay()

    return {**found, "input": fed}, ""


def _wrapped(setup: TrainingSetup) -> DistributedDataParallel:
    devices = [setup.device] if setup.device.type == "cuda" else None
    # Statistics of batch norms stay each process's own, as in Convoy's step: sending them is no part of the gradients' way.
    options: dict[str, Any] = {BUFFERS_ARE_SENT: False}
    model = DistributedDataParallel(setup.model, device_ids=devices, gradient_as_bucket_view=True, **options)
    if setup.gradients is not None:
        if dist.get_backend() != dist.Backend.NCCL:
            raise InputError("--providers", f"+{setup.gradients}", "a group of NCCL for PyTorch's bf16_compress_hook")
        cast("Any", model).register_comm_hook(None, bf16_compress_hook)
    return model


def _steps(
    setup: TrainingSetup, model: DistributedDataParallel, forward: Callable[..., Any] | nn.Module
) -> dict[str, Step]:
    """The steps of `ProviderSteps`; `forward` is the model or what it was compiled to."""
    optimizer, scaler = setup.optimizer(), setup.scaler()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(setup.device.type, setup.amp or torch.bfloat16, enabled=setup.amp is not None):
            loss = loss_of(forward(setup.x), setup.target)
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

    return {"step": step, "compute": alone, "input": fed}


def _words(setup: TrainingSetup) -> list[str]:
    words = ["channels_last", "gradient_as_bucket_view", "buffers not broadcast"]
    words += ["cudnn.benchmark", "TF32", "fused SGD"] if setup.device.type == "cuda" else []
    words += [f"autocast {str(setup.amp).rpartition('.')[2]}"] if setup.amp else []
    return [*words, *(["bf16_compress_hook"] if setup.gradients else [])]
