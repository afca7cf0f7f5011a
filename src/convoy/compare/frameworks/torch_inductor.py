"""torch.compile with Inductor: frozen weights for inference; on a GPU its code is captured as one CUDA graph by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch

from convoy.compare.case import Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, UnsupportedCaseError
from convoy.compare.frameworks.torch_eager import captured_inference, captured_training
from convoy.compare.frameworks.torch_model import FrameworkStep, built, check_step, load_net, outputs_of, set_flags
from convoy.measurement.device.detect import compiler_version
from convoy.typed_torch import torch_compile

GPU_OPTIONS: Final = MappingProxyType(
    {
        "default": {},
        "conv_1x1_as_mm": {"conv_1x1_as_mm": True},
        "coordinate descent": {"coordinate_descent_tuning": True},
        "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
    }
)
"""Inductor's options on a GPU by name, each tried as a way of its own. CUDA graphs are captured by hand: that replays faster than
its own, which check their inputs at each call."""

SLOW: Final = ("max-autotune",)
"""Options that compile for minutes: `convoy compare` leaves them out, the benchmarks ask for them by name."""


class Inductor:
    """torch.compile at its best known setting.

    Args:
        options: names among `GPU_OPTIONS` to try on a GPU.
    """

    def __init__(self, options: Sequence[str] = tuple(name for name in GPU_OPTIONS if name not in SLOW)) -> None:
        self.options = tuple(options)

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        """Both memory formats on a CPU, where either may win; on a GPU channels_last, once with each set of options.

        Mode reduce-overhead is tried on a GPU where no captured graph worked.
        """
        if case.device == "cpu" and not compiler_version():
            raise UnsupportedCaseError("Inductor needs a C++ compiler on a CPU: install g++")
        if case.training and case.dtype == "fp16" and case.device == "cpu":
            raise UnsupportedCaseError("training in fp16 on a CPU: PyTorch has no such autocast; use bf16")
        frozen = "" if case.training else ", freezing"
        if case.device == "cpu":
            return [
                FrameworkConfig(f"torch.compile{frozen}, {layout}", partial(_on_cpu, case, material, layout))
                for layout in ("channels_last", "nchw")
            ]
        more = f"{frozen}, channels_last, cudnn.benchmark, TF32 where fp32"
        found = [
            FrameworkConfig(
                f"torch.compile {name}, one CUDA graph{more}", partial(_captured, case, material, GPU_OPTIONS[name])
            )
            for name in self.options
        ]
        spare = partial(_captured, case, material, {"triton.cudagraphs": True}, by_hand=False)
        return [*found, FrameworkConfig(f"torch.compile reduce-overhead{more}", spare, spare=True)]


FRAMEWORK = Inductor()


def _compiled(case: Case, model: torch.nn.Module, options: Mapping[str, Any]) -> Any:
    """The model compiled with options of its own: global ones would count for whichever way is compiled next."""
    return torch_compile(model, dynamic=False, options={"freezing": not case.training, **options})


def _on_cpu(case: Case, material: CaseInputs, layout: str) -> BuiltModel:
    net = load_net(case, material, layout)
    set_flags(case.device)
    compiled = _compiled(case, net.model, {})
    if case.training:
        step = FrameworkStep(net, case, compiled)
        return built(step, lambda: check_step(step, step.gradients), case)

    @torch.no_grad()  # freezing does not work under inference_mode
    def run() -> Any:
        return compiled(net.x)

    return built(run, lambda: outputs_of(run()), case)


def _captured(case: Case, material: CaseInputs, options: Mapping[str, Any], *, by_hand: bool = True) -> BuiltModel:
    net = load_net(case, material, "channels_last")
    set_flags(case.device)
    compiled = _compiled(case, net.model, options)
    if case.training:
        if by_hand and case.dtype != "fp16":
            return captured_training(net, case, compiled)
        step = FrameworkStep(net, case, compiled)
        return built(step, lambda: check_step(step, step.gradients), case)
    if by_hand:
        return captured_inference(net, case, compiled)

    @torch.no_grad()
    def run() -> Any:
        return compiled(net.x)

    return built(run, lambda: outputs_of(run()), case)
