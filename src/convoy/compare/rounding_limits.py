"""Error that rounding justifies: how far a net's results move when its weights and input are rounded once.

Nets differ in that by orders of magnitude: behind fifty batch norms over random weights, one rounding to bf16 turns a good
part of the gradient, and one to fp32 moves DenseNet-121's by 0.8 % (batch 4, 64 pixels). An option that computes in a half type
rounds oftener, in every layer.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from convoy.capture.copies import copy_module
from convoy.compare.case import Case
from convoy.compare.checking import loss_error, part, relative_error
from convoy.compare.frameworks.base import CaseInputs, Outputs
from convoy.compare.frameworks.torch_model import FrameworkNet, FrameworkStep, check_step, load_net, outputs_of
from convoy.pipeline.check.rounding import InputPerturbation, unit_roundoff
from convoy.zoo import parse_dtype

LEAST: Final = {"out": 0.1, "grad": 0.5, "loss": 0.1}
"""Relative error that bf16 and fp16 may always have: of outputs, of the gradients of a whole step and of the loss behind it."""

OFTENER: Final = {"out": 3.0, "grad": 3.0, "loss": 10.0}
"""Times the effect of one rounding that is allowed. Autocast to bf16 had 1.1 to 1.5 times that effect in outputs and gradients
(ResNet-50, GoogLeNet, AlexNet on a CPU, random weights); the loss behind a step is one number, which moves by chance."""

MOST: Final = 0.95
"""Relative error of outputs and losses that is never allowed: what has nothing to do with the right ones, zeros too, is off by 1
and more. Gradients of a small batch may be that far off by one rounding: then they say nothing, and the losses decide."""


def half_limits(case: Case, material: CaseInputs, dtype: str) -> dict[str, float]:
    """Largest relative errors of a setting that computes in `dtype`: `out` of inference, `grad` and `loss` of training.

    Args:
        case: net and setting.
        material: its weights and input, and the exact results.
        dtype: `bf16` or `fp16`.
    """
    effects = _effects(dataclasses.replace(case, dtype="fp32"), material, dtype)
    limits = {name: max(LEAST[name], OFTENER[name] * effect) for name, effect in effects.items()}
    return {name: limit if name == "grad" else min(MOST, limit) for name, limit in limits.items()}


def rounding_limits(case: Case, net: FrameworkNet, exact: Outputs) -> dict[str, float]:
    """Relative errors that rounding explains, by PyTorch's own run: `out` of inference, `grad` and `loss` of training.

    Weights and input are moved by one rounding each. Another implementation rounds in other places: it may be `OFTENER` times
    as far off.

    Args:
        case: what is run; its dtype says how coarse a rounding is.
        net: model, input and labels on the device; they are left as they are.
        exact: the exact results; of inference maybe those of the first images alone.
    """
    kind = parse_dtype(case.dtype)
    shake = InputPerturbation(unit_roundoff({kind, net.x.dtype}, cuda=case.device == "cuda"))
    moved = copy_module(net.model)
    with torch.no_grad():
        for tensor in moved.parameters():
            tensor.copy_(shake(tensor))
    if case.training:
        effects = _step_effects(case, FrameworkNet(moved, shake(net.x), net.labels), exact)
    else:
        x = shake(net.x)[: exact["out0"].shape[0]]
        with torch.no_grad():
            effects = {"out": relative_error(outputs_of(moved.to(kind)(x.to(kind))), exact)}
    return {name: OFTENER[name] * effect for name, effect in effects.items()}


def _effects(case: Case, material: CaseInputs, dtype: str) -> dict[str, float]:
    exact = material.exact()
    net = load_net(case, material, keep_memory=False)
    with torch.no_grad():
        for tensor in (*net.model.parameters(), net.x):
            tensor.copy_(tensor.to(parse_dtype(dtype)))
    if not case.training:
        with torch.no_grad():
            return {"out": relative_error(outputs_of(net.model(net.x)), exact)}
    return _step_effects(case, net, exact)


def _step_effects(case: Case, net: FrameworkNet, exact: Outputs) -> dict[str, float]:
    step = FrameworkStep(net, case)
    found = check_step(step, step.gradients)
    gradients = part(found, "grad:")
    return {
        "grad": relative_error(gradients, {name: exact[name] for name in gradients}),
        "loss": loss_error(found, exact, "loss1"),
    }
