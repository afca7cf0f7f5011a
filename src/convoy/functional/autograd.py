"""One convolution in torch's autograd graph: each direction by the engine, or by ATen where the engine does not compute it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import torch

from convoy.engines.base import Buffers, Executable
from convoy.engines.gpu.device_tensors import aligned_on_gpu
from convoy.engines.known_defects import defect_of
from convoy.engines.manifest import load_engine
from convoy.engines.torch_flags import convolutions, without_onednn
from convoy.engines.torch_operators import DTYPES
from convoy.errors import LaunchError, UnsupportedError
from convoy.functional.config_choice import first_config
from convoy.measurement.data import in_layout, result_specs
from convoy.measurement.oracle import conv_sizes
from convoy.problem import ConvProblem, EngineConfig, Epilogue
from convoy.settings import Settings
from convoy.target import Target

FORMATS: Final = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
"""Layout of a problem -> torch's word."""

_ALIGNMENT: Final = 256  # bytes: what engines are promised for the start of their workspace


def device_context(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a tensor's device is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=256)
def _built(
    config: EngineConfig, problem: ConvProblem, target: Target, extra: tuple[str, ...], device: torch.device
) -> Executable:
    """An executable, kept for the next call; safe to launch from several threads."""
    del device  # part of the key: code is loaded for each GPU
    return load_engine(config.engine, extra).build(problem, config.knobs, target)


def _run(
    config: EngineConfig,
    problem: ConvProblem,
    target: Target,
    settings: Settings,
    args: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Build or find the executable, launch it on tensors brought into the problem's layout, and return what it wrote."""
    device = args[0].device
    executable = _built(config, problem, target, settings.engines, device)
    if settings.deterministic and not executable.deterministic:
        raise UnsupportedError(
            config.engine, problem, "gives different bits from run to run, and deterministic was asked for"
        )
    results: list[torch.Tensor | None] = [None for _ in result_specs(problem)]
    if not executable.allocates_results:
        for index, spec in enumerate(result_specs(problem)):
            memory_format = FORMATS[problem.layout] if len(spec.shape) == 4 else torch.contiguous_format
            results[index] = torch.empty(
                spec.shape, dtype=DTYPES[spec.dtype], device=device, memory_format=memory_format
            )
    workspace = None
    if executable.workspace_bytes:
        workspace = torch.empty(executable.workspace_bytes + _ALIGNMENT, dtype=torch.uint8, device=device)
        workspace = workspace[-workspace.data_ptr() % _ALIGNMENT :]
    laid = tuple(aligned_on_gpu(in_layout(tensor, problem.layout)) for tensor in args)
    buffers = Buffers(laid, results, executable.pack([aligned_on_gpu(tensor.contiguous()) for tensor in constants]))
    executable.launch(buffers, workspace)
    found = [tensor for tensor in buffers.results if tensor is not None]
    if len(found) < len(results):
        raise LaunchError(f"{config.engine} left a result unwritten for {problem}")
    return found


def _as_asked(problem: ConvProblem, device: torch.device, settings: Settings) -> AbstractContextManager[object]:
    """A context in which ATen's convolutions give the same bits in every run where that is asked for; else its flags stay."""
    return convolutions(problem.numerics, device, deterministic=True) if settings.deterministic else nullcontext()


class ConvolutionFunction(torch.autograd.Function):
    """One convolution in torch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        problem: ConvProblem,
        config: EngineConfig,
        target: Target,
        settings: Settings,
    ) -> torch.Tensor:
        """The batch x, the weight and the bias → y, by a config of an engine."""
        ctx.save_for_backward(x, weight)
        ctx.how = problem, config, target, settings
        (y,) = _run(config, problem, target, settings, (x,), (weight,) if bias is None else (weight, bias))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares *grad_outputs
        ctx: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Only the gradients that are wanted, by the same engine where it computes them."""
        x, weight = ctx.saved_tensors
        problem, config, target, settings = ctx.how
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        engine = load_engine(config.engine, settings.engines)
        with device_context(dy.device):
            dx = dweight = dbias = None
            dgrad = replace(problem, direction="dgrad", epilogue=Epilogue())
            wgrad = replace(problem, direction="wgrad", epilogue=Epilogue(bias=wants_bias))
            if wants_x and engine.supports(dgrad, target):
                dx = _run(first_config(engine, dgrad, target, settings), dgrad, target, settings, (dy, weight), ())[0]
            if (wants_weight or wants_bias) and engine.supports(wgrad, target):
                config = first_config(engine, wgrad, target, settings)
                dweight, *rest = _run(config, wgrad, target, settings, (x, dy), ())
                dbias = rest[0] if rest else None
            missing = [wants_x and dx is None, wants_weight and dweight is None, wants_bias and dbias is None]
            if any(missing):
                stride, padding, dilation, groups = conv_sizes(problem)
                faulty = [p for p in (dgrad, wgrad) if defect_of(p, target) is not None]
                with _as_asked(problem, dy.device, settings), without_onednn() if faulty else nullcontext():
                    found = torch.ops.aten.convolution_backward(
                        dy, x, weight, [problem.k], stride, padding, dilation, False, [0, 0], groups, missing
                    )
                dx, dweight, dbias = (
                    a if a is not None else b for a, b in zip((dx, dweight, dbias), found, strict=True)
                )
        return dx, dweight if wants_weight else None, dbias, None, None, None, None
