"""Subgraphs of one batch norm of a training step and the operators fused with it: their sizes, and the role of each value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from convoy.engines.subgraph import parse_subgraph
from convoy.graph.ir import Graph, Node, Ref
from convoy.problem import SubgraphProblem, volume_layout

FORWARD = "aten._native_batch_norm_legit_functional.default"
BACKWARD = "aten.native_batch_norm_backward.default"
_ADD, _RELU, _MASK = "aten.add.Tensor", "aten.relu.default", "aten.threshold_backward.default"
_PART = "aten.slice.Tensor"


@dataclass(frozen=True)
class Norm:
    """One batch norm with batch statistics, forward or backward.

    Attributes:
        forward: True for the forward pass, False for the backward pass.
        rows: values of a channel: images times pixels, or volumes likewise.
        c: channels.
        dtype: dtype of images and their gradients.
        eps: added to the variance.
        momentum: momentum of the running statistics (forward).
        start: the first channel of dy that belongs to the norm (backward).
        whole_c: channels of dy, which may hold several branches (backward); y has `c`.
        relu: whether a ReLU follows (forward), or its mask comes first (backward).
        args: the role of each arg of the subgraph. Forward: x, weight, bias, mean, var (running), residual. Backward: dy,
            more (a second summand of dy), y (whose zeros mask dy), x, weight, mean, rstd (of the batch), unused.
        results: the role of each result. Forward: y, mean, rstd, new_mean, new_var. Backward: dx, dweight, dbias, masked (dy
            after sum and mask).
        volumes: whether x is [n, c, d, h, w].
    """

    forward: bool
    rows: int
    c: int
    dtype: str
    eps: float
    momentum: float = 0.0
    relu: bool = False
    args: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    start: int = 0
    whole_c: int = 0
    volumes: bool = False

    @property
    def layout(self) -> str:
        """The memory format in which a row's channels are neighbours."""
        return volume_layout("nhwc") if self.volumes else "nhwc"

    @property
    def unit(self) -> int:
        """The largest power of two up to 16 that divides all offsets between rows."""
        step = math.gcd(self.c, self.start, self.whole_c or self.c)
        return min(16, step & -step)


@dataclass(slots=True)
class _Roles:
    """Roles of values, by name; a value with two roles makes the subgraph unsupported."""

    found: dict[str, str] = field(default_factory=dict[str, str])
    clash: bool = False

    def give(self, value: object, role: str) -> None:
        name = value.name if isinstance(value, Ref) else ""
        self.clash |= not name or name in self.found
        self.found[name] = role


def norm_of(problem: SubgraphProblem) -> Norm | None:
    """The batch norm that a subgraph computes; None for any other subgraph."""
    graph = parse_subgraph(problem.text)
    forward = [node for node in graph.nodes if node.op == FORWARD]
    backward = [node for node in graph.nodes if node.op == BACKWARD]
    if len(forward) + len(backward) != 1:
        return None
    return _forward(graph, forward[0]) if forward else _backward(graph, backward[0])


def _forward(graph: Graph, norm: Node) -> Norm | None:
    """norm, then perhaps a residual's sum, then perhaps a ReLU."""
    if len(norm.args) != 8 or norm.args[5] is not True or norm.kwargs:
        return None
    roles = _Roles()
    for value, role in zip(norm.args[:5], ("x", "weight", "bias", "mean", "var"), strict=True):
        roles.give(value, role)
    last, relu = norm.outputs[0], False
    rest = [node for node in graph.nodes if node is not norm]
    if rest and rest[0].op == _ADD and not rest[0].kwargs and len(rest[0].args) == 2:
        other = [arg for arg in rest[0].args if arg != Ref(last)]
        if len(other) != 1:
            return None
        roles.give(other[0], "residual")
        last = rest.pop(0).outputs[0]
    if rest and rest[0].op == _RELU and rest[0].args == (Ref(last),):
        last, relu = rest.pop(0).outputs[0], True
    made = dict(zip(norm.outputs[1:], ("mean", "rstd", "new_mean", "new_var"), strict=False)) | {last: "y"}
    momentum, eps = norm.args[6:]
    if rest or not isinstance(momentum, float) or not isinstance(eps, float):
        return None
    return _norm(graph, roles, made, relu=relu, forward=True, eps=eps, momentum=momentum)


def _backward(graph: Graph, norm: Node) -> Norm | None:
    """Perhaps a sum of two gradients, then perhaps a ReLU's mask, then norm."""
    if len(norm.args) != 10 or norm.args[7] is not True or norm.args[9] != (True, True, True) or norm.kwargs:
        return None
    dy, x, weight, running_mean, running_var, mean, rstd, _, eps, _ = norm.args
    if not isinstance(eps, float):
        return None
    roles = _Roles()
    before = [node for node in graph.nodes if node is not norm]
    masked, relu = "", False
    if before and before[-1].op == _MASK and before[-1].args[2] == 0 and Ref(before[-1].outputs[0]) == dy:
        mask = before.pop()
        masked, relu, dy = mask.outputs[0], True, mask.args[0]
        roles.give(mask.args[1], "y")
    start = whole_c = 0
    if before and before[-1].op == _ADD and not before[-1].kwargs and Ref(before[-1].outputs[0]) == dy:
        total = before.pop()
        masked = masked or total.outputs[0]
        dy, more = total.args
        roles.give(more, "more")
    elif before and before[-1].op == _PART and Ref(before[-1].outputs[0]) == dy:
        part = before.pop()
        if len(part.args) != 4 or part.args[1] != 1 or not isinstance(part.args[2], int):
            return None
        dy, start = part.args[0], part.args[2]
        whole_c = graph.values[dy.name].spec.shape[1] if isinstance(dy, Ref) else 0
    if before:
        return None
    wanted = ((dy, "dy"), (x, "x"), (weight, "weight"), (mean, "mean"), (rstd, "rstd"))
    for value, role in wanted:
        roles.give(value, role)
    for value in (running_mean, running_var):  # read by nobody: a backward pass with batch statistics needs them not
        roles.give(value, "unused")
    made = dict(zip(norm.outputs, ("dx", "dweight", "dbias"), strict=True)) | ({masked: "masked"} if masked else {})
    found = _norm(graph, roles, made, relu=relu, forward=False, eps=eps, whole_c=whole_c)
    return None if found is None else replace(found, start=start, whole_c=whole_c)


def _norm(
    graph: Graph, roles: _Roles, made: dict[str, str], *,
    relu: bool, forward: bool, eps: float, momentum: float = 0.0, whole_c: int = 0,
) -> Norm | None:  # fmt: skip
    """The batch norm with its roles; None if a value is missing, has two roles, or has an unexpected shape or dtype."""
    if roles.clash or set(roles.found) != set(graph.inputs) or not set(graph.outputs) <= set(made):
        return None
    args = tuple(roles.found[name] for name in graph.inputs)
    results = tuple(made[name] for name in graph.outputs)
    first = graph.values[next(name for name, role in roles.found.items() if role == "x")].spec
    if len(first.shape) not in (4, 5) or len(set(results)) != len(results):
        return None
    n, c, *sides = first.shape
    images = {"x", "y", "residual", "dy", "more", "dx", "masked"}
    named = [*zip(graph.inputs, args, strict=True), *zip(graph.outputs, results, strict=True)]
    for name, role in named:
        spec = graph.values[name].spec
        wanted = (first.shape, first.dtype) if role in images else ((c,), "fp32")
        if role == "dy" and whole_c:
            wanted = (n, whole_c, *sides), first.dtype
        if (spec.shape, spec.dtype) != wanted:
            return None
    if not ({"y"} if forward else {"dx"}) <= set(results):
        return None
    rows = n * math.prod(sides)
    return Norm(forward, rows, c, first.dtype, eps, momentum, relu, args, results, volumes=len(sides) == 3)
