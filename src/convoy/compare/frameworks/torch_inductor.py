"""torch.compile with Inductor: frozen weights for inference, CUDA graphs by its mode reduce-overhead on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from convoy.compare.case import Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, UnsupportedCaseError
from convoy.compare.frameworks.torch_model import FrameworkStep, built, check_step, load_net, outputs_of, set_flags
from convoy.measurement.device.detect import compiler_version


class Inductor:
    """torch.compile at its best known setting.

    Mode max-autotune is left out: with freezing it had not compiled ResNet-50 after 200 s on 16 cores.
    """

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        """Both memory formats on a CPU, where either may win; channels_last on a GPU, without CUDA graphs where they fail."""
        if case.device == "cpu" and not compiler_version():
            raise UnsupportedCaseError("Inductor needs a C++ compiler on a CPU: install g++")
        if case.training and case.dtype == "fp16" and case.device == "cpu":
            raise UnsupportedCaseError("training in fp16 on a CPU: PyTorch has no such autocast; use bf16")
        cuda = case.device == "cuda"
        modes = (
            ("reduce-overhead", "default") if cuda and case.training else ("reduce-overhead",) if cuda else ("default",)
        )
        layouts = ("channels_last",) if cuda else ("channels_last", "nchw")
        frozen = "" if case.training else ", freezing"
        more = ", cudnn.benchmark, TF32 where fp32" if cuda else ""
        # On a GPU nearly all of the time is the compiler's: others may use the device meanwhile.
        return [
            FrameworkConfig(
                f"torch.compile mode {mode}{frozen}, {layout}{more}",
                partial(_build, case, material, layout, mode),
                chooses=not cuda,
                spare=cuda and index > 0,
            )
            for layout in layouts
            for index, mode in enumerate(modes)
        ]


FRAMEWORK = Inductor()


def _build(case: Case, material: CaseInputs, layout: str, mode: str) -> BuiltModel:
    from torch._inductor import config

    torch._dynamo.reset()
    net = load_net(case, material, layout)
    config.freezing = not case.training
    set_flags(case.device)
    compiled = torch.compile(net.model, mode=mode, dynamic=False)
    if case.training:
        step = FrameworkStep(net, case, compiled)
        return built(step, lambda: check_step(step, step.gradients), case)

    @torch.no_grad()  # freezing does not work under inference_mode
    def run() -> Any:
        return compiled(net.x)

    return built(run, lambda: outputs_of(run()), case)
