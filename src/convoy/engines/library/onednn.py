"""onednn: convolutions and linear layers on a CPU with weights packed once and the epilogue fused, by PyTorch's oneDNN.

    y = activation(conv(x, weight) + bias + residual)    -->    one primitive: convolution, sum, eltwise

`weight` says how the weight lies. `packed` is the arrangement that oneDNN asks for: it spares a reorder in every launch,
half the time of ResNet-50's deepest 3x3 layers at batch 1, for a second copy of the weight in memory. A packed convolution
computes in channels_last whatever it is given, so in nchw the result is copied; `plain` takes the weight as torch has it.
`mkl` is MKL's packed matrix product, for linear layers. Measurements are in docs/kernels/cpu.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch

from convoy.engines.activations import finish
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.known_defects import defect_of
from convoy.engines.product_precision import products
from convoy.engines.subgraph import torch_format
from convoy.engines.support_checks import torch_convolution, torch_sizes
from convoy.engines.torch_flags import convolutions
from convoy.problem import ConvolutionProblem, LayerProblem, LinearProblem, Problem, kind_in_words
from convoy.support import Support
from convoy.target import Target

_CPU: Final = torch.device("cpu")

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

_AFTER_SUM: Final = frozenset({"none", "relu"})
"""Activations that the operator with a residual fuses in fp32; others follow as an ATen call on its new result. In half types
it fuses none: for some shapes it then falls back to an ATen operator that has no kernel for them ("Unsupported datatype for
add_relu", PyTorch 2.11 to 2.13)."""


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor holds, the padding of oneDNN's blocks included."""
    return torch.ops.mkldnn._nbytes(tensor) if tensor.is_mkldnn else tensor.numel() * tensor.element_size()


class _Fused(Executable):
    """Shared by both kinds of layer: results that oneDNN allocates, and opaque packed constants."""

    allocates_results = True

    def resident_bytes(self, constants: Packed) -> int:
        """Bytes of the packed weight, of the original where the operator wants that too, and of the bias."""
        return sum(_nbytes(t) for t in constants if t is not None)


class _OnednnConvolution(_Fused):
    """torch.ops.mkldnn._convolution_pointwise, or its binary variant if there is a residual.

    A result of one channel or one pixel fits several memory formats. For such a result the binary variant of PyTorch 2.11
    describes the residual wrongly ("could not create a memory"), so the residual is added by an ATen call.
    """

    def __init__(self, problem: ConvolutionProblem, weight: str) -> None:
        self._problem, self._weight = problem, weight
        self._memory_format = torch_format(problem.layout, len(problem.x_spec.shape))
        stride, pad, dilation, groups = torch_sizes(problem)
        self._sizes = (list(pad), list(stride), list(dilation), groups)
        activation = problem.epilogue.activation
        self._sums = problem.epilogue.residual and problem.k > 1 and prod(problem.conv_spec.shape[2:]) > 1
        fuses = problem.x_dtype == "fp32" and activation in _AFTER_SUM
        self._fused: str | None = activation if fuses and activation != "none" else None
        self._following = "none" if fuses else activation
        operators = torch.ops.mkldnn._convolution_pointwise
        self._unary, self._binary = operators.default, operators.binary

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Weight, then the bias or None."""
        weight = constants[0].detach().contiguous(memory_format=self._memory_format)
        if self._weight == "packed":
            shape = list(self._problem.x_spec.shape)
            weight = torch.ops.mkldnn._reorder_convolution_weight(weight, *self._sizes, shape)
        return weight, constants[1].detach() if len(constants) > 1 else None

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        weight, bias = buffers.constants
        epilogue = self._problem.epilogue
        with convolutions(self._problem.numerics, _CPU):
            if self._sums:
                x, residual = buffers.args
                y = self._binary(x, residual, weight, bias, *self._sizes, "add", None, self._fused, [], None)
                finish(y, None, None, self._following)
            elif epilogue.residual:
                y = self._unary(buffers.args[0], weight, bias, *self._sizes, *_POST_OPS["none"])
                finish(y, None, buffers.args[1], epilogue.activation)
            else:
                y = self._unary(buffers.args[0], weight, bias, *self._sizes, *_POST_OPS[epilogue.activation])
        buffers.results[0] = y.contiguous(memory_format=self._memory_format)


class _OnednnLinear(_Fused):
    """torch.ops.mkldnn._linear_pointwise, or its binary variant, with the weight packed or plain."""

    def __init__(self, problem: LinearProblem, weight: str) -> None:
        self._problem, self._weight = problem, weight
        operators = torch.ops.mkldnn._linear_pointwise
        self._unary, self._binary = operators.default, operators.binary

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Weight, then the bias or None."""
        weight = constants[0].detach()
        if self._weight == "packed":
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, self._problem.n)
        return weight, constants[1].detach() if len(constants) > 1 else None

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        weight, bias = buffers.constants
        epilogue = self._problem.epilogue
        with products(self._problem.numerics, _CPU):
            if epilogue.residual:
                x, residual = buffers.args
                y = self._binary(x, residual, weight, bias, "add")
                finish(y, None, None, epilogue.activation)
            else:
                y = self._unary(buffers.args[0], weight, bias, *_POST_OPS[epilogue.activation])
        buffers.results[0] = y


class _MklLinear(_Fused):
    """torch.ops.mkl._mkl_linear: MKL's packed SGEMM. The epilogue but for the bias follows in place."""

    def __init__(self, problem: LinearProblem) -> None:
        self._problem = problem

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Packed weight, the original (for other batches, which do not come), then the bias or None."""
        weight = constants[0].detach()
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, self._problem.n)
        return packed, weight, constants[1].detach() if len(constants) > 1 else None

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        epilogue = self._problem.epilogue
        y = torch.ops.mkl._mkl_linear.default(buffers.args[0], *buffers.constants, self._problem.n)
        finish(y, None, buffers.args[1] if epilogue.residual else None, epilogue.activation)
        buffers.results[0] = y


class Onednn(Engine):
    """oneDNN's convolutions and matrix products as oneDNN chooses them."""

    id = "onednn"
    family = "library"
    devices = ("cpu",)
    version = 2

    def supports(self, problem: Problem, target: Target) -> Support:
        """Convolutions (fprop) and linear layers on a CPU, in fp32, and in bf16 and fp16 where the CPU has them."""
        if target.device != "cpu":
            return Support.no(f"runs on CPUs, got {target.device}")
        if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
            return Support.no("needs a PyTorch with oneDNN built in and torch.backends.mkldnn.enabled")
        if not isinstance(problem, LayerProblem):
            return Support.no(f"computes convolutions and linear layers, got {kind_in_words(problem)}")
        if problem.n == 0:
            return Support.no("needs a batch of at least 1, got 0")
        if isinstance(problem, ConvolutionProblem):
            support = torch_convolution(problem)
            if not support:
                return support
            if defect := defect_of(problem, target):
                return Support.no(f"known defect {defect.name}: {defect.words}")
        return _has_dtype(problem.x_spec.dtype)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """How the weight lies, the likely best first."""
        del target
        if isinstance(problem, ConvolutionProblem):
            # In channels_last a packed weight was never slower than a plain one, in any layer of six nets.
            choices = ["packed", "plain"] if problem.layout in ("nchw", "ncdhw") else ["packed"]
        else:
            choices = ["packed", "plain"]
            if (
                isinstance(problem, LinearProblem)
                and problem.x_spec.dtype == "fp32"
                and torch.backends.mkl.is_available()
            ):
                choices.append("mkl")
        return [Knobs.of(weight=choice) for choice in choices]

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Nothing is compiled here; oneDNN generates its code in the first launch and keeps it."""
        del target
        weight = str(knobs["weight"])
        if isinstance(problem, ConvolutionProblem):
            return _OnednnConvolution(problem, weight)
        assert isinstance(problem, LinearProblem)
        return _MklLinear(problem) if weight == "mkl" else _OnednnLinear(problem, weight)


def _has_dtype(dtype: str) -> Support:
    """Whether oneDNN computes in a dtype on this CPU."""
    if dtype == "fp32":
        return Support.yes()
    if dtype == "bf16" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Support.yes()
    if dtype == "fp16" and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return Support.yes()
    return Support.no(f"does not support {dtype} on this CPU")


ENGINE = Onednn()
