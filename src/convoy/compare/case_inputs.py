"""The inputs of all frameworks in a comparison, made once by a child process with PyTorch: weights, input, exact results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from convoy.capture.copies import copy_module
from convoy.compare.case import LEARNING_RATE, Case
from convoy.compare.checking import (
    LEAST_ERROR,
    LEAST_GRADIENT_ERROR,
    LOSS_ERROR,
    WORSE,
    WORSE_STEP,
    loss_error,
    part,
    relative_error,
)
from convoy.compare.frameworks.base import CaseInputs, Outputs
from convoy.compare.frameworks.torch_model import (
    FrameworkNet,
    FrameworkStep,
    check_step,
    outputs_of,
    set_flags,
    train_without_dropout,
)
from convoy.compare.rounding_limits import rounding_limits
from convoy.errors import InputError
from convoy.pipeline.check.end_to_end import float_outputs
from convoy.pipeline.check.float64 import ORACLE_FLOPS, exact_outputs
from convoy.typed_torch import from_numpy, in_memory_format, save_safetensors
from convoy.zoo import check_inputs, example_args, input_size, load_model, parse_dtype
from convoy.zoo.model_names import is_exported

Turn = Callable[[], AbstractContextManager[None]]
"""Gives a context in which the device is ours alone."""


def make(case: Case, folder: Path, turn: Turn = nullcontext) -> dict[str, Any]:
    """Write the case's material into a folder; its facts, which are also written as `facts.json`.

    Args:
        case: net and setting.
        folder: where it goes.
        turn: context in which work runs on the device.

    Raises:
        InputError: no such model, weights, dtype or size.
    """
    model = load_model(case.model, weights=case.weights or None, trust=case.trust)
    x = _input(model, case)
    one = x if is_exported(case.model) else x[:1]  # an exported program may take its own batch alone
    classes = _classes(model, one)
    labels = torch.arange(case.batch) * 7919 % max(1, classes)
    state = {name: t.detach().contiguous().clone() for name, t in model.state_dict().items()}
    save_safetensors(state, folder / "weights.safetensors")
    save_safetensors({"input": x, "labels": labels}, folder / "input.safetensors")
    operations = 2 * _multiplications(model, one) * len(x) // len(one)
    facts: dict[str, Any] = {
        "transform_input": bool(getattr(model, "transform_input", False)),
        "shape": list(x.shape),
        "flops": operations,
        "parameters_bytes": sum(t.numel() * t.element_size() for t in state.values()),
    }
    with turn():
        facts |= (
            _training(case, model, x, labels, folder, operations)
            if case.training
            else _inference(case, model, x, folder, operations)
        )
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return facts


def read(folder: Path) -> CaseInputs:
    """The material that `make` wrote."""
    return CaseInputs(folder, json.loads((folder / "facts.json").read_text(encoding="utf-8")))


def export_onnx(case: Case, material: CaseInputs) -> None:
    """Write the model as ONNX: in fp16 where that is asked for, else in fp32."""
    own = is_exported(case.model)
    dtype = "fp16" if case.dtype == "fp16" else "fp32"
    weights = case.weights if case.weights == "DEFAULT" else str(material.weights_path)
    model = load_model(case.model, weights=None if own else weights, dtype=dtype, trust=case.trust)
    x = from_numpy(material.input()).to(parse_dtype(dtype))
    cast("Any", torch.onnx).export(
        model, (x,), str(material.onnx_path), dynamo=True, external_data=False, verbose=False
    )


def _input(model: nn.Module, case: Case) -> torch.Tensor:
    args = example_args(model, batch=case.batch, size=case.size or None, default_size=input_size(case.model))
    check_inputs(model, args, case.model)
    if len(args) != 1 or not isinstance(args[0], torch.Tensor):
        raise InputError("model", case.model, "a model of one image tensor", "compare gives it nothing else.")
    return args[0].contiguous()


def _classes(model: nn.Module, x: torch.Tensor) -> int:
    try:
        with torch.no_grad():
            outputs = float_outputs(model(x))
    except RuntimeError as error:
        shape = "x".join(map(str, x.shape))
        raise InputError("size", shape, "images that the model takes", str(error).splitlines()[0][:300]) from error
    return int(outputs[0].shape[-1])


def _multiplications(model: nn.Module, x: torch.Tensor) -> int:
    """Multiply-adds of convolutions and linear layers in one call on x."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops() // 2


def _inference(case: Case, model: nn.Module, x: torch.Tensor, folder: Path, operations: int) -> dict[str, Any]:
    with torch.no_grad():
        model, x = model.to(case.device), x.to(case.device)
        exact = exact_outputs(model, (x,), {}, operations)
        wanted = {f"out{i}": t.cpu() for i, t in enumerate(exact)}
        set_flags(case.device)
        kind = parse_dtype(case.dtype)
        keep = wanted["out0"].shape[0]
        explained = rounding_limits(case, FrameworkNet(model, x, x), {name: t.numpy() for name, t in wanted.items()})
        stock = outputs_of(model.to(kind)(x[:keep].to(kind)))
    save_safetensors({name: t.contiguous() for name, t in wanted.items()}, folder / "exact.safetensors")
    error = relative_error(stock, {name: t.numpy() for name, t in wanted.items()})
    return {
        "stock_error": error,
        "limits": {"out": max(LEAST_ERROR[case.dtype], WORSE * error, explained["out"])},
        "reference": "float64",
    }


def _training(
    case: Case, model: nn.Module, x: torch.Tensor, labels: torch.Tensor, folder: Path, operations: int
) -> dict[str, Any]:
    """Two steps by float64, or by fp32 alone where that would take minutes; and stock PyTorch's error to it.

    Where fp32 stands for what is exact, stock PyTorch runs in the other memory format: the same run once more would have no error
    at all, and everybody else's would be too large.
    """
    model, x, labels = model.to(case.device), x.to(case.device), labels.to(case.device)
    train_without_dropout(model)
    affordable = case.device == "cuda" or 3 * operations <= ORACLE_FLOPS
    reference = copy_module(model).double() if affordable else copy_module(model)
    exact = exact_step(FrameworkNet(reference, x.double() if affordable else x, labels))
    save_safetensors(
        {name: from_numpy(np.array(a, order="C")) for name, a in exact.items()}, folder / "exact.safetensors"
    )
    set_flags(case.device)
    if not affordable:
        model, x = in_memory_format(model, torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    explained = rounding_limits(case, FrameworkNet(model, x, labels), exact)
    step = FrameworkStep(FrameworkNet(model, x, labels), case)
    stock = check_step(step, step.gradients)
    error = relative_error(part(stock, "grad:"), part(exact, "grad:"))
    off = max(loss_error(stock, exact, name) for name in ("loss0", "loss1"))
    limits = {
        "grad": max(LEAST_GRADIENT_ERROR[case.dtype], WORSE_STEP * error, explained["grad"]),
        "loss": max(LOSS_ERROR[case.dtype], WORSE_STEP * off, explained["loss"]),
    }
    return {"stock_error": error, "limits": limits, "reference": "float64" if affordable else "fp32"}


def exact_step(net: FrameworkNet) -> Outputs:
    """Loss before and after the first SGD step, and its gradients, in the model's own type."""
    parameters = dict(net.model.named_parameters())

    def loss() -> torch.Tensor:
        return functional.cross_entropy(float_outputs(net.model(net.x))[0], net.labels)

    first = loss()
    gradients = cast(
        "Sequence[torch.Tensor | None]", torch.autograd.grad(first, list(parameters.values()), allow_unused=True)
    )
    found: Outputs = {"loss0": first.detach().double().cpu().numpy()}
    with torch.no_grad():
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            if gradient is not None:
                found[f"grad:{name}"] = gradient.double().cpu().numpy()
                parameter -= LEARNING_RATE * gradient
        found["loss1"] = loss().double().cpu().numpy()
    return found
