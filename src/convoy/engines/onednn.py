"""onednn: convolutions and linear layers on a CPU with weights packed once and the epilogue fused, by PyTorch's oneDNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.problem import ConvProblem, LinearProblem, Problem
from convoy.support import Support
from convoy.target import Target

_POST_OPS: Final[dict[str, tuple[str, list[Any], str]]] = {
    "none": ("none", [], ""),
    "relu": ("relu", [], ""),
    "relu6": ("hardtanh", [0.0, 6.0], ""),
    "silu": ("swish", [], ""),
    "hardswish": ("hardswish", [], ""),
    "hardsigmoid": ("hardsigmoid", [], ""),
    "sigmoid": ("sigmoid", [], ""),
    "gelu": ("gelu", [], "none"),
}
"""Activation → attribute, scalars and algorithm of torch.ops.mkldnn's pointwise operators."""

_AFTER_ADD: Final = frozenset({"none", "relu"})
"""Activations that the binary form fuses after the residual."""


class _Convolution(Executable):
    """torch.ops.mkldnn._convolution_pointwise with a reordered weight; its results are tensors of its own."""

    allocates_results = True

    def __init__(self, problem: ConvProblem) -> None:
        self._problem = problem
        self._padding = [problem.pad_h, problem.pad_w]
        self._stride = [problem.stride_h, problem.stride_w]
        self._dilation = [problem.dilation_h, problem.dilation_w]
        self._format = torch.channels_last if problem.layout == "nhwc" else torch.contiguous_format

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        weight = constants[0].contiguous(memory_format=self._format)
        packed = torch.ops.mkldnn._reorder_convolution_weight(
            weight, self._padding, self._stride, self._dilation, self._problem.groups, list(self._problem.x_spec.shape)
        )
        return packed, constants[1] if len(constants) > 1 else None

    def resident_bytes(self, constants: Packed) -> int:
        size = self._problem.weight_spec.size_bytes
        return size + (constants[1].numel() * constants[1].element_size() if constants[1] is not None else 0)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        epilogue = self._problem.epilogue
        weight, bias = buffers.constants
        sizes = (self._padding, self._stride, self._dilation, self._problem.groups)
        if epilogue.residual:
            after = None if epilogue.activation == "none" else epilogue.activation
            y = torch.ops.mkldnn._convolution_pointwise.binary(
                buffers.args[0], buffers.args[1], weight, bias, *sizes, "add", 1.0, after, [], None
            )
        else:
            attribute, scalars, algorithm = _POST_OPS[epilogue.activation]
            y = torch.ops.mkldnn._convolution_pointwise(
                buffers.args[0], weight, bias, *sizes, attribute, scalars, algorithm
            )
        buffers.results[0] = y.contiguous(memory_format=self._format)


class _Linear(Executable):
    """torch.ops.mkldnn._linear_pointwise with a reordered weight."""

    allocates_results = True

    def __init__(self, problem: LinearProblem) -> None:
        self._problem = problem

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        packed = torch.ops.mkldnn._reorder_linear_weight(constants[0], self._problem.n)
        return packed, constants[1] if len(constants) > 1 else None

    def resident_bytes(self, constants: Packed) -> int:
        return self._problem.weight_spec.size_bytes

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        weight, bias = buffers.constants
        attribute, scalars, algorithm = _POST_OPS[self._problem.epilogue.activation]
        buffers.results[0] = torch.ops.mkldnn._linear_pointwise(
            buffers.args[0], weight, bias, attribute, scalars, algorithm
        )


class Onednn(Engine):
    """oneDNN's direct, GEMM and Winograd convolutions as oneDNN chooses them, weights in its own blocked arrangement."""

    id = "onednn"
    family = "library"

    def supports(self, problem: Problem, target: Target) -> Support:
        if target.device != "cpu":
            return Support.no("oneDNN runs on CPUs")
        if not torch.backends.mkldnn.is_available():
            return Support.no("this PyTorch was built without oneDNN")
        if not isinstance(problem, (ConvProblem, LinearProblem)):
            return Support.no("does convolutions and linear layers only")
        if problem.x_spec.dtype != "fp32" or problem.y_spec.dtype != "fp32":
            return Support.no(f"needs fp32, got {problem.x_spec.dtype}")
        if problem.n == 0:
            return Support.no("needs a batch of at least 1")
        if problem.epilogue.residual and problem.epilogue.activation not in _AFTER_ADD:
            return Support.no(f"fuses no {problem.epilogue.activation} after a residual")
        if isinstance(problem, LinearProblem):
            return Support.no("fuses no residual after a linear layer") if problem.epilogue.residual else Support.yes()
        if problem.direction != "fprop":
            return Support.no(f"packs weights for fprop only, got {problem.direction}")
        if problem.layout == "blocked":
            return Support.no("takes nchw and nhwc tensors")
        return Support.yes()

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        del knobs, target
        return _Linear(problem) if isinstance(problem, LinearProblem) else _Convolution(problem)  # type: ignore[arg-type]


ENGINE = Onednn()
