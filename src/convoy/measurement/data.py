"""The tensors that a candidate is tried on: specs and random data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeGuard

import numpy as np
import torch

from convoy.engines.subgraph import torch_format
from convoy.engines.torch_operators import DTYPES
from convoy.errors import InputError
from convoy.graph.text import parse_graph
from convoy.measurement.chain_weights import weight_in_chain, weights_in_chains
from convoy.measurement.net_weights import net_weights
from convoy.measurement.pool_indices import draw_indices, readers_of_indices
from convoy.problem import (
    ConvolutionProblem,
    ConvProblem,
    LayerProblem,
    LayoutProblem,
    LinearProblem,
    Problem,
    SubgraphProblem,
    TensorSpec,
)

DATA_KINDS: Final = ("integer", "normal", "cancelling")

LARGE: Final = 1 << 24
"""Elements from which numbers are drawn in the storage dtype: in fp32, and integers in int64, a layer's data would take
several times its memory in the net."""

_MAGNITUDES: Final = {"fp64": (4, 4, 2**24), "fp32": (4, 4, 2**24), "fp16": (3, 2, 2**11), "bf16": (2, 1, 2**8)}
"""By dtype: the largest integers of the first and of the second operand, and the largest integer up to which the dtype is
exact."""


@dataclass(frozen=True, slots=True)
class Data:
    """Tensors of one problem: args in the problem's memory format, constants contiguous (as `pack` takes them)."""

    args: tuple[torch.Tensor, ...]
    constants: tuple[torch.Tensor, ...]


def tensor_specs(problem: Problem) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Specs of a problem's args and of its constants."""
    if isinstance(problem, LayoutProblem):
        return [problem.spec], []
    if isinstance(problem, SubgraphProblem):
        graph = parse_graph(problem.text)
        return [graph.values[name].spec for name in graph.inputs], [value.spec for value in graph.constants()]
    if has_dynamic_weight(problem):
        (x, *residual), constants = tensor_specs(with_constant_weight(problem))
        return [x, *constants, *residual], []
    y, bias = problem.y_spec, TensorSpec((problem.k,), problem.y_spec.dtype)
    residual = (
        [problem.conv_spec if isinstance(problem, ConvolutionProblem) else y] if problem.epilogue.residual else []
    )
    biases = [bias] if problem.epilogue.bias else []
    if isinstance(problem, ConvolutionProblem) and problem.direction == "dgrad":
        return [y, problem.weight_spec], []
    if isinstance(problem, ConvolutionProblem) and problem.direction == "wgrad":
        return [problem.x_spec, y], []
    return [problem.x_spec, *residual], [problem.weight_spec, *biases]


def has_dynamic_weight(problem: Problem) -> TypeGuard[ConvolutionProblem]:
    """Whether weight and bias are args, new in every launch."""
    return isinstance(problem, ConvolutionProblem) and problem.dynamic_weight


def dynamic_constants(problem: Problem) -> int:
    """How many args are the weight and bias that follow x in a problem with a dynamic weight."""
    return 1 + problem.epilogue.bias if has_dynamic_weight(problem) else 0


def with_constant_weight(problem: ConvolutionProblem) -> ConvolutionProblem:
    """The same convolution with weight and bias as constants."""
    return replace(problem, dynamic_weight=False)


def result_specs(problem: Problem) -> list[TensorSpec]:
    """Specs of a problem's results."""
    if isinstance(problem, LayoutProblem):
        return [problem.spec]
    if isinstance(problem, SubgraphProblem):
        graph = parse_graph(problem.text)
        return [graph.values[name].spec for name in graph.outputs]
    if isinstance(problem, LinearProblem) or problem.direction == "fprop":
        return [problem.y_spec]
    if problem.direction == "dgrad":
        return [problem.x_spec]
    bias = [TensorSpec((problem.k,), problem.y_dtype)] if problem.epilogue.bias else []
    return [problem.weight_spec, *bias]


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor in a problem's memory format (`torch_format`)."""
    if layout == "blocked" and tensor.dim() == 4:
        return tensor.contiguous().to_mkldnn()
    return tensor.contiguous(memory_format=torch_format(layout, tensor.dim()))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A strided tensor with the same values, for any layout."""
    return tensor.to_dense() if tensor.is_mkldnn else tensor


def make_data(problem: Problem, seed: int, kind: str = "normal", device: str = "cpu") -> Data:
    """Random tensors for a problem.

    Args:
        problem: the problem.
        seed: the same seed gives the same data on the same kind of device, because numbers are drawn on the device.
        kind: `integer` (small integers; every partial sum in any order, with bias and residual, is an integer that
            accumulator and storage types hold, so a correct result is exact), `normal` (rectified normal x, normal weights,
            results of about unit variance) or `cancelling` (terms of alternating sign whose sum nearly vanishes).
        device: where the tensors are.

    Raises:
        InputError: another kind.
    """
    if kind not in DATA_KINDS:
        raise InputError("kind", kind, ", ".join(DATA_KINDS))
    if has_dynamic_weight(problem):
        plain = make_data(with_constant_weight(problem), seed, kind, device)
        x, *residual = plain.args
        return Data((x, *(in_layout(t, problem.layout) for t in plain.constants), *residual), ())
    generator = torch.Generator(device).manual_seed(seed)
    arg_specs, constant_specs = tensor_specs(problem)
    if isinstance(problem, LayerProblem):
        args, constants = _operands(problem, kind, generator)
        if isinstance(problem, ConvProblem) and problem.weight_mask:
            constants[0] = constants[0] * _kept(problem).to(device)
    else:
        args = [_plain(spec, kind, generator) for spec in arg_specs]
        constants = [_plain(spec, kind, generator) for spec in constant_specs]
        weights = None
        if isinstance(problem, SubgraphProblem):
            graph = parse_graph(problem.text)
            for name, node in readers_of_indices(graph).items():
                args[graph.inputs.index(name)] = draw_indices(graph, node, generator)
            chained = weights_in_chains(graph)
            for index, value in enumerate(graph.constants()):
                if value.name in chained:
                    constants[index] = weight_in_chain(value.spec.shape, kind, generator)
            weights = net_weights(graph, seed, device)
        constants = weights or constants
    layout = problem.source if isinstance(problem, LayoutProblem) else problem.layout
    # `pop` frees each tensor once it is converted.
    placed = tuple(in_layout(args.pop(0).to(DTYPES[spec.dtype]), layout) for spec in arg_specs)
    held = tuple(t.to(DTYPES[s.dtype]) for t, s in zip(constants, constant_specs, strict=True))
    return Data(placed, held)


def _plain(spec: TensorSpec, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Random values for one value of a subgraph."""
    if not DTYPES[spec.dtype].is_floating_point:
        return _integers(0, 1, spec.shape, generator)
    dtype = _drawn_in(spec)
    return (
        _integers(-4, 4, spec.shape, generator, dtype) if kind == "integer" else _normal(spec.shape, generator, dtype)
    )


def _drawn_in(spec: TensorSpec) -> torch.dtype | None:
    """The dtype to draw a value in; None: the default of the drawing function."""
    return DTYPES[spec.dtype] if spec.elements >= LARGE else None


def _normal(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=generator, device=generator.device, dtype=dtype)


def _integers(
    least: int, most: int, shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Integers from `least` to `most`, both included."""
    return torch.randint(least, most + 1, tuple(shape), generator=generator, device=generator.device, dtype=dtype)


def _operands(
    problem: LayerProblem, kind: str, generator: torch.Generator
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The args and constants of a sum of products: two operands, then the terms that the epilogue adds."""
    arg_specs, constant_specs = tensor_specs(problem)
    gradient = isinstance(problem, ConvolutionProblem) and problem.direction != "fprop"
    first, second = arg_specs[0].shape, (arg_specs[1] if gradient else constant_specs[0]).shape
    first_in, second_in = _drawn_in(arg_specs[0]), _drawn_in(arg_specs[1]) if gradient else None
    added = [] if gradient else [*arg_specs[1:], *constant_specs[1:]]
    if kind == "integer":
        dtypes = {result_specs(problem)[0].dtype, getattr(problem, "acc_dtype", "fp32")}
        most_first, most_second, limit = min((_MAGNITUDES[d] for d in dtypes), key=lambda m: m[2])
        terms = (limit - most_first * len(added)) // (most_first * most_second)
        a = _integers(-most_first, most_first, first, generator, first_in)
        b = _integers(1, most_second, second, generator, second_in)
        b *= 2 * _integers(0, 1, second, generator, second_in) - 1
        if (mask := _at_most(problem, terms, generator)) is not None:
            b *= mask
        rest = [_integers(-most_first, most_first, s.shape, generator, _drawn_in(s)) for s in added]
    else:
        length = max(problem.reduction_length, 1)
        fine = kind == "cancelling"  # drawn in full precision, whatever memory it takes
        a = _normal(first, generator, None if fine else first_in)
        b = _normal(second, generator, None if fine else second_in)
        b /= math.sqrt(length)
        rest = [_normal(s.shape, generator, _drawn_in(s)) for s in added]
        if kind == "cancelling":
            a = 1 + a * 1e-2
            b = b.abs() * _alternating(problem, second).to(b.device)
        elif not (isinstance(problem, ConvolutionProblem) and problem.direction == "dgrad"):
            a = a.relu_()
    if gradient:
        return [a, b], []
    return [a, *rest[: len(arg_specs) - 1]], [b, *rest[len(arg_specs) - 1 :]]


def _by_output(problem: LayerProblem, rows: torch.Tensor) -> torch.Tensor:
    """Rows, one for each output channel of the sum, in the shape of the second operand."""
    if isinstance(problem, LinearProblem):
        return rows
    p = problem
    if p.direction == "wgrad":
        return rows.reshape(p.k, p.n, *p.y_spec.shape[2:]).transpose(0, 1)
    if p.direction == "dgrad":
        by_group = rows.reshape(p.groups, p.c // p.groups, p.k // p.groups, *p.weight_spec.shape[2:])
        return by_group.transpose(1, 2).reshape(p.weight_spec.shape)
    return rows.reshape(p.weight_spec.shape)


def _kept(problem: ConvProblem) -> torch.Tensor:
    """The mask of a problem's weight, booleans [k, c / groups, r, s]."""
    if problem.mask is None:
        expected = "a problem with its mask's positions"
        raise InputError(
            "weight_mask", problem.weight_mask, expected, "A key holds only the mask's digest: give the mask too."
        )
    bits = np.unpackbits(np.frombuffer(problem.mask.bits, np.uint8), count=problem.mask.positions)
    return torch.as_tensor(bits.astype(bool)).reshape(problem.weight_spec.shape)


def _outputs(problem: LayerProblem) -> int:
    return problem.c if isinstance(problem, ConvolutionProblem) and problem.direction == "dgrad" else problem.k


def _at_most(problem: LayerProblem, terms: int, generator: torch.Generator) -> torch.Tensor | None:
    """A mask of the second operand that leaves at most `terms` products in any sum; None if there are no more anyway."""
    outputs, length = _outputs(problem), problem.reduction_length
    if length <= terms:
        return None
    mask = torch.zeros(outputs, length, dtype=torch.bool, device=generator.device)
    mask.scatter_(1, _integers(0, length - 1, (outputs, terms), generator), value=True)
    return _by_output(problem, mask)


def _alternating(problem: LayerProblem, shape: Sequence[int]) -> torch.Tensor:
    signs = 1 - 2 * (torch.arange(problem.reduction_length) % 2)
    return _by_output(problem, signs.expand(_outputs(problem), -1)).reshape(shape)
