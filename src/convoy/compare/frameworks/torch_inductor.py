"""torch.compile with Inductor: frozen weights for inference; on a GPU its code is captured as one CUDA graph by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

import torch

from convoy.compare.case import Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, UnsupportedCaseError
from convoy.compare.frameworks.torch_eager import captured_inference, captured_training
from convoy.compare.frameworks.torch_model import FrameworkStep, built, check_step, load_net, outputs_of, set_flags
from convoy.measurement.device.detect import compiler_version
from convoy.typed_torch import torch_compile

Turn = Callable[[], AbstractContextManager[None]]

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

COMPILES_ALONE: Final = ("default", "conv_1x1_as_mm")
"""Options that measure nothing while they compile: only the first run of the compiled code does, in which Triton's configurations
and cuDNN's plans are timed. So nets can be compiled side by side."""

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
                f"torch.compile {name}, one CUDA graph{more}",
                partial(_captured, case, material, GPU_OPTIONS[name], in_turn=_compiles_alone(case, name)),
                chooses=not _compiles_alone(case, name),
            )
            for name in self.options
        ]
        spare = partial(_captured, case, material, {"triton.cudagraphs": True}, by_hand=False)
        return [*found, FrameworkConfig(f"torch.compile reduce-overhead{more}", spare, spare=True)]


FRAMEWORK = Inductor()


def _compiles_alone(case: Case, name: str) -> bool:
    """Whether only the first run needs the device to itself. A backward pass is compiled when it is first needed."""
    return name in COMPILES_ALONE and not case.training


def _compiled(case: Case, model: torch.nn.Module, options: Mapping[str, Any], turn: Turn | None = None) -> Any:
    """The model compiled with options of its own: global ones would count for whichever way is compiled next.

    With `turn`, the device is asked for when the compiled code runs for the first time.
    """
    chosen = {"freezing": not case.training, **options}
    if turn is None:
        return torch_compile(model, dynamic=False, options=chosen)
    return torch_compile(model, dynamic=False, backend=partial(_first_run_in_turn, chosen, turn))


def _first_run_in_turn(
    options: Mapping[str, Any], turn: Turn, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Inductor's code of a graph; its first run has the device to itself."""
    inductor = cast("Any", torch)._TorchCompileInductorWrapper  # what `torch.compile(options=...)` calls
    code = inductor(None, dict(options), False)(graph, inputs)
    ran: list[bool] = []

    def run(*args: Any) -> Any:
        if ran:
            return code(*args)
        with turn():
            ran.append(True)
            found = code(*args)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return found

    return run


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


def _captured(
    case: Case, material: CaseInputs, options: Mapping[str, Any], *, by_hand: bool = True, in_turn: bool = False
) -> BuiltModel:
    net = load_net(case, material, "channels_last")
    set_flags(case.device)
    compiled = _compiled(case, net.model, options, material.turn if in_turn else None)
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
