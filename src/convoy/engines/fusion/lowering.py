"""From a subgraph's nodes to `Tensor`s: each operator as functions of elements, other positions, and reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from convoy.engines.fusion.lowered_elementwise import ELEMENTWISE
from convoy.engines.fusion.lowered_movement import MOVEMENT
from convoy.engines.fusion.lowered_reductions import REDUCTIONS
from convoy.engines.fusion.node_call import NodeCall
from convoy.engines.fusion.tensors import Input, NotFusibleError, Tensor
from convoy.graph.ir import Graph
from convoy.problem import TensorSpec

STORED: Final = frozenset({"fp16", "bf16", "fp32"})
"""Dtypes of values in memory."""

INDEX_LIMIT: Final = 2**31

Rule = Callable[[NodeCall], Tensor | Sequence[Tensor]]

RULES: Final[Mapping[str, Rule]] = {**ELEMENTWISE, **MOVEMENT, **REDUCTIONS}
"""`NAME` or `NAME.OVERLOAD` of an ATen operator → the function that it computes."""


@dataclass(frozen=True, slots=True)
class LoweredSubgraph:
    """A subgraph.

    Attributes:
        inputs: its arguments and constants, in order.
        results: its results, in order.
        result_specs: their shapes and dtypes.
        result_strides: where their elements lie.
        layout: the memory format of arguments and results.
    """

    inputs: tuple[Input, ...]
    results: tuple[Tensor, ...]
    result_specs: tuple[TensorSpec, ...]
    result_strides: tuple[tuple[int, ...], ...]
    layout: str


def dense_strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Strides of a value of a memory format: 4-D and 5-D ones may have their channels last."""
    last = (layout in ("nhwc", "ndhwc") and len(shape) == 4) or (layout == "ndhwc" and len(shape) == 5)
    order = [0, *range(2, len(shape)), 1] if last else list(range(len(shape)))
    found = [0] * len(shape)
    for place, dim in enumerate(order):
        found[dim] = math.prod(shape[each] for each in order[place + 1 :])
    return tuple(found)


def in_slice(lowered: LoweredSubgraph, result: int, pitch: int) -> LoweredSubgraph:
    """The same with one result as some channels of an NHWC tensor of `pitch` channels."""
    strides = list(lowered.result_strides)
    _, _, h, w = lowered.result_specs[result].shape
    strides[result] = (h * w * pitch, 1, w * pitch, pitch)
    return replace(lowered, result_strides=tuple(strides))


def lower(graph: Graph, layout: str) -> LoweredSubgraph:
    """What a subgraph computes.

    Args:
        graph: the subgraph.
        layout: the memory format of its arguments and results; constants are contiguous.

    Raises:
        NotFusibleError: an operator, dtype or size that the generator does not know.
    """
    known: dict[str, Tensor] = {}
    for kind, names, where in (
        ("x", graph.inputs, layout),
        ("c", [value.name for value in graph.constants()], "nchw"),
    ):
        for place, name in enumerate(names):
            spec = graph.values[name].spec
            _check_stored(spec)
            strides = dense_strides(spec.shape, where)
            known[name] = Input(spec.shape, f"{kind}{place}", spec.dtype, strides)
    inputs = tuple(tensor for tensor in known.values() if isinstance(tensor, Input))
    for node in graph.nodes:
        call = NodeCall(graph, node, known)
        rule = RULES.get(f"{call.operator}.{call.overload}") or RULES.get(call.operator)
        if rule is None or not node.op.startswith("aten."):
            raise NotFusibleError(f"does not compute {node.op}")
        made = rule(call)
        found = (made,) if isinstance(made, Tensor) else tuple(made)
        for place, name in enumerate(node.outputs):
            if not name:
                continue
            if place >= len(found):
                raise NotFusibleError(f"computes only the first result of {node.op}")
            if found[place].shape != call.result_spec(place).shape:
                raise NotFusibleError(f"does not know this form of {node.op}")
            known[name] = found[place]
    specs = tuple(graph.values[name].spec for name in graph.outputs)
    for spec in specs:
        _check_stored(spec)
    strides = tuple(dense_strides(spec.shape, layout) for spec in specs)
    return LoweredSubgraph(inputs, tuple(known[name] for name in graph.outputs), specs, strides, layout)


def _check_stored(spec: TensorSpec) -> None:
    if spec.dtype not in STORED:
        raise NotFusibleError(f"needs fp16, bf16 or fp32, got {spec.dtype}")
    if not 0 < spec.elements < INDEX_LIMIT:
        raise NotFusibleError(f"needs tensors of 1 to 2^31 - 1 elements, got {spec.elements}")
