"""When a result counts as right: data, oracle, error, bound, verdict; and guards round every buffer that is written.

Direct methods are checked on integers, where every sum is exact and a single wrong term shows; all methods on ordinary
data against a bound that depends on the method, the dtypes and the length of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from convoy.engines.activations import activate
from convoy.engines.interpret import DTYPES, compile_graph
from convoy.errors import InputError
from convoy.graph.text import parse_graph
from convoy.problem import ConvProblem, LayoutProblem, LinearProblem, Problem, SubgraphProblem, TensorSpec

EXACT_FAMILIES = frozenset({"gemm", "implicit_gemm", "direct", "library", "reference"})
"""Families whose results on integer data must be exact: they add products and do nothing else."""

EXACT_ACTIVATIONS = frozenset({"none", "relu", "relu6"})

FAMILY_FACTOR = {"winograd": 8.0, "winograd4": 60.0, "fft": 30.0}
"""Error allowed over that of a direct sum. Winograd's transforms amplify rounding: F(2x2) by 2 to 3, F(4x4) by 10 to 30 in
practice (Lavin and Gray, arXiv 1509.09308; Barabasz et al., arXiv 1803.10986); FFT by the logarithm of its size."""

HALF_ROUNDINGS = 3.0
"""Roundings to the storage type that unfused library calls may do: after the sum, the residual and the activation."""


@dataclass(frozen=True, slots=True)
class Data:
    """Tensors of one problem: args in the problem's memory format, constants contiguous (as `pack` takes them)."""

    args: tuple[torch.Tensor, ...]
    constants: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a result is right; its relative L2 error, the bound that it was held to, and why not."""

    ok: bool
    error: float
    bound: float
    reason: str = ""


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor in a problem's memory format; tensors that are not 4-D are contiguous."""
    if layout == "blocked" and tensor.dim() == 4:
        return tensor.contiguous().to_mkldnn()
    if layout == "nhwc" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


def make_data(problem: Problem, seed: int, kind: str = "normal", device: str = "cpu") -> Data:
    """Random tensors for a problem.

    Args:
        problem: what is to be computed.
        seed: same seed, same data.
        kind: `integer` (small integers whose sums are exact in every accumulator and fit the storage type), `normal`
            (rectified normal inputs, normal weights) or `cancelling` (terms of alternating sign whose sum nearly vanishes).
        device: where to put them.
    """
    if kind not in ("integer", "normal", "cancelling"):
        raise InputError("kind", kind, "integer, normal or cancelling")
    generator = torch.Generator().manual_seed(seed)
    layout = problem.source if isinstance(problem, LayoutProblem) else problem.layout
    arg_specs, constant_specs = tensor_specs(problem)
    length = problem.reduction_length if isinstance(problem, (ConvProblem, LinearProblem)) else 1
    args = [_fill(spec, kind, generator, 1) for spec in arg_specs]
    constants = [
        _fill(spec, kind, generator, length if i == 0 else 1, weight=True) for i, spec in enumerate(constant_specs)
    ]
    if kind == "cancelling" and isinstance(problem, (ConvProblem, LinearProblem)):
        args[0] = torch.ones_like(args[0]) + args[0] * 1e-2
    placed = tuple(in_layout(tensor.to(device), layout) for tensor in args)
    return Data(placed, tuple(tensor.to(device) for tensor in constants))


def tensor_specs(problem: Problem) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Specs of a problem's args and of its constants."""
    if isinstance(problem, LayoutProblem):
        return [problem.spec], []
    if isinstance(problem, SubgraphProblem):
        graph = parse_graph(problem.text)
        return [graph.values[name].spec for name in graph.inputs], [value.spec for value in graph.constants()]
    y, bias = problem.y_spec, TensorSpec((problem.k,), problem.y_spec.dtype)
    residual = [y] if problem.epilogue.residual else []
    biases = [bias] if problem.epilogue.bias else []
    if isinstance(problem, ConvProblem) and problem.direction == "dgrad":
        return [y, problem.weight_spec], []
    if isinstance(problem, ConvProblem) and problem.direction == "wgrad":
        return [problem.x_spec, y], []
    return [problem.x_spec, *residual], [problem.weight_spec, *biases]


def _fill(
    spec: TensorSpec, kind: str, generator: torch.Generator, length: int, *, weight: bool = False
) -> torch.Tensor:
    dtype = DTYPES[spec.dtype]
    if not dtype.is_floating_point:
        return torch.randint(0, 2, spec.shape, generator=generator).to(dtype)
    if kind == "integer":
        most = 4 if spec.dtype in ("fp32", "fp64") else 1
        values = torch.randint(-most, most + 1, spec.shape, generator=generator).to(torch.float64)
        if weight and spec.dtype in ("fp16", "bf16") and length > 64:  # bf16 holds integers up to 256 only
            values *= torch.rand(spec.shape, generator=generator) < 64 / length
        return values.to(dtype)
    values = torch.randn(spec.shape, generator=generator, dtype=torch.float32)
    if weight:
        values = values / math.sqrt(max(length, 1))
        if kind == "cancelling" and values.dim() > 1:
            flat = values.abs().reshape(values.shape[0], -1)
            flat[:, 1::2] *= -1
            values = flat.reshape(values.shape)
        return values.to(dtype)
    return (values if kind == "cancelling" else values.relu()).to(dtype)


def oracle(problem: Problem, data: Data) -> list[torch.Tensor]:
    """The problem's results in float64, by PyTorch's own float64 arithmetic on the data's device."""
    args = [tensor.to_dense() if tensor.is_mkldnn else tensor for tensor in data.args]
    args = [t.double() if t.is_floating_point() else t for t in args]
    constants = [t.double() if t.is_floating_point() else t for t in data.constants]
    if isinstance(problem, LayoutProblem):
        return [args[0]]
    if isinstance(problem, SubgraphProblem):
        return list(compile_graph(parse_graph(problem.text), double=True)(args, constants))
    if isinstance(problem, ConvProblem) and problem.direction != "fprop":
        return _gradients(problem, args)
    x, weight = args[0], constants[0]
    if isinstance(problem, LinearProblem):
        y = F.linear(x, weight)
    else:
        y = F.conv2d(x, weight, None, *conv_sizes(problem))
    if problem.epilogue.bias:
        y = y + constants[1].reshape(-1, *[1] * (y.dim() - 2))
    if problem.epilogue.residual:
        y = y + args[1]
    return [activate(y, problem.epilogue.activation)]


def conv_sizes(problem: ConvProblem) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]:
    """Stride, padding, dilation, groups, as torch's functions take them after the bias."""
    stride = (problem.stride_h, problem.stride_w)
    return stride, (problem.pad_h, problem.pad_w), (problem.dilation_h, problem.dilation_w), problem.groups


def _gradients(problem: ConvProblem, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    stride, padding, dilation, groups = conv_sizes(problem)
    if problem.direction == "dgrad":
        dy, weight = args
        shape = problem.x_spec.shape
        return [torch.nn.grad.conv2d_input(shape, weight, dy, stride, padding, dilation, groups)]
    x, dy = args
    dweight = torch.nn.grad.conv2d_weight(x, problem.weight_spec.shape, dy, stride, padding, dilation, groups)
    return [dweight, dy.sum((0, 2, 3))] if problem.epilogue.bias else [dweight]


def bound(problem: Problem, family: str) -> float:
    """The relative L2 error that a result may have on ordinary data.

    Strict fp32: 0.6 · 2^-23 · sqrt(reduction length) for direct methods, times the family's factor; at least two roundings.
    fp32 as PyTorch allows: the same on a CPU; where TF32 may be used, its 10-bit products (2^-10). Halves: their storage's
    rounding, once for each unfused step.
    """
    if isinstance(problem, LayoutProblem):
        return 0.0
    length = problem.reduction_length if isinstance(problem, (ConvProblem, LinearProblem)) else 64
    dtype = storage_dtype(problem)
    direct = max(0.6 * 2.0**-23 * math.sqrt(length), 2.0**-22) * FAMILY_FACTOR.get(family, 1.0)
    numerics = problem.numerics if isinstance(problem, (ConvProblem, LinearProblem)) else "as_torch"
    if dtype == "fp64":
        return direct * 2.0**-29
    if dtype in ("fp16", "bf16"):
        return HALF_ROUNDINGS * 2.0 ** (-11 if dtype == "fp16" else -8) * (2.0 if family in FAMILY_FACTOR else 1.0)
    return direct if numerics == "strict" else max(2 * direct, 0.0)


def tf32_bound() -> float:
    """Bound for fp32 problems computed in TF32: products of 10-bit fractions."""
    return 2.0**-10


def storage_dtype(problem: Problem) -> str:
    """The dtype that results are stored in."""
    if isinstance(problem, LayoutProblem):
        return problem.spec.dtype
    if isinstance(problem, SubgraphProblem):
        graph = parse_graph(problem.text)
        found = [graph.values[name].spec.dtype for name in graph.outputs]
        return next((d for d in ("bf16", "fp16", "fp32", "fp64") if d in found), "fp32")
    return problem.y_spec.dtype


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 error; infinite where one is finite and the other is not."""
    found = (result.to_dense() if result.is_mkldnn else result).double()
    if not torch.equal(torch.isfinite(found), torch.isfinite(exact)):
        return math.inf
    found, wanted = torch.nan_to_num(found), torch.nan_to_num(exact)
    norm = float(wanted.norm())
    difference = float((found - wanted).norm())
    return difference / norm if norm else difference


def is_exact(problem: Problem, family: str, kind: str) -> bool:
    """Whether a result must equal the oracle's rounded value bit for bit."""
    if isinstance(problem, LayoutProblem):
        return True
    if kind != "integer" or isinstance(problem, SubgraphProblem):
        return False
    return family in EXACT_FAMILIES and problem.epilogue.activation in EXACT_ACTIVATIONS


def check(
    problem: Problem,
    family: str,
    results: Sequence[torch.Tensor | None],
    exact: Sequence[torch.Tensor],
    kind: str,
    *,
    tf32: bool = False,
) -> Verdict:
    """Hold results against the oracle's.

    Args:
        problem: what was computed.
        family: the engine's family, which decides what is allowed.
        results: what a launch left; None counts as unwritten.
        exact: the oracle's float64 results.
        kind: the data's kind: on `integer` data direct families must be exact.
        tf32: whether the engine may use TF32 products (numerics `as_torch` on a GPU).
    """
    limit = max(bound(problem, family), tf32_bound() if tf32 and storage_dtype(problem) == "fp32" else 0.0)
    worst = 0.0
    for index, (result, wanted) in enumerate(zip(results, exact, strict=True)):
        if result is None or tuple(result.shape) != tuple(wanted.shape):
            shape = None if result is None else tuple(result.shape)
            return Verdict(False, math.inf, limit, f"result {index} has shape {shape}, expected {tuple(wanted.shape)}")
        dense = result.to_dense() if result.is_mkldnn else result
        if not dense.is_floating_point() or is_exact(problem, family, kind):
            if not torch.equal(torch.nan_to_num(dense), torch.nan_to_num(wanted.to(dense.dtype))):
                return Verdict(False, relative_error(dense, wanted), 0.0, _first_wrong(index, dense, wanted))
            continue
        error = relative_error(dense, wanted)
        worst = max(worst, error)
        if not error <= limit:
            return Verdict(
                False, error, limit, f"error {error:.3g} over {limit:.3g}; {_first_wrong(index, dense, wanted)}"
            )
    return Verdict(True, worst, limit)


def _first_wrong(index: int, result: torch.Tensor, exact: torch.Tensor) -> str:
    wanted = exact.to(result.dtype)
    scale = float(wanted.double().abs().mean()) or 1.0
    wrong = ~((result.double() - wanted.double()).abs() <= 1e-2 * scale)
    where = torch.nonzero(wrong if bool(wrong.any()) else result != wanted)
    if not len(where):
        return f"result {index} differs"
    at = tuple(where[0].tolist())
    return f"result {index} is {float(result[at])} at {at}, expected {float(wanted[at])}; {len(where)} places differ"


GUARD_BYTES = 512
_PATTERN = 0xA5


class Guarded:
    """A buffer with guard bytes before and after it, filled with what no program may rely on.

    Args:
        spec: shape and dtype; for a workspace, a flat `u8` spec.
        layout: memory format of a 4-D buffer.
        device: where it lies.
    """

    def __init__(self, spec: TensorSpec, layout: str, device: str) -> None:
        size = spec.size_bytes
        self._raw = torch.full((size + 2 * GUARD_BYTES,), _PATTERN, dtype=torch.uint8, device=device)
        inner = self._raw[GUARD_BYTES : GUARD_BYTES + size]
        inner.fill_(0xFF)  # NaN in every floating dtype
        flat = inner.view(DTYPES[spec.dtype])
        if len(spec.shape) == 4 and layout == "nhwc":
            n, c, h, w = spec.shape
            self.tensor = flat.view(n, h, w, c).permute(0, 3, 1, 2)
        else:
            self.tensor = flat.view(spec.shape)

    def intact(self) -> bool:
        """Whether nobody wrote outside."""
        head, tail = self._raw[:GUARD_BYTES], self._raw[-GUARD_BYTES:]
        return bool((head == _PATTERN).all()) and bool((tail == _PATTERN).all())
