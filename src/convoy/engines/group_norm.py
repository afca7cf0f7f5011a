"""A group norm with the activation behind it, as a subgraph: what the engines that compute both in one go share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch

from convoy.engines.subgraph import parse_subgraph
from convoy.graph.ir import Graph, Node, Ref
from convoy.problem import SubgraphProblem, volume_layout
from convoy.regions.activation import activation_of
from convoy.regions.epilogue import only_reader

GROUP_NORM: Final = "aten.group_norm.default"

ACTIVATIONS: Final = ("none", "relu", "silu")
"""Activations that all kernels apply."""

LEAKY: Final = ("leaky_relu", "prelu")
"""Activations with a factor for negative values, which some kernels apply."""

_DEFAULTS: Final = (None, None, None, None, 1e-5)
"""Of a group norm's arguments; it has at least two."""


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """The computation of a subgraph: y = activation((x - mean) / sqrt(variance + eps) * scale + shift) by image and group.

    Attributes:
        images: images or volumes.
        pixels: pixels of an image or volume.
        channels: channels, `groups` times as many as a group has.
        groups: groups of channels.
        scale: whether there is a factor for each channel, the first constant.
        shift: whether there is a summand for each channel, the next constant.
        eps: added to the variance.
        activation: one of `ACTIVATIONS` or `LEAKY`; prelu's factor, one or one a channel, is then the last constant.
        dtype: of all values.
        volumes: whether x is [n, c, d, h, w].
        slope: leaky_relu's factor.
    """

    images: int
    pixels: int
    channels: int
    groups: int
    scale: bool
    shift: bool
    eps: float
    activation: str
    dtype: str
    volumes: bool = False
    slope: float = 0.0

    @property
    def layout(self) -> str:
        """The memory format in which a pixel's channels are neighbours."""
        return volume_layout("nhwc") if self.volumes else "nhwc"

    @property
    def size(self) -> int:
        """Channels of a group."""
        return self.channels // self.groups

    @staticmethod
    def of(problem: SubgraphProblem) -> GroupNorm | None:
        """The computation of a subgraph of images or volumes; None if it is no such group norm."""
        graph = parse_subgraph(problem.text)
        if not 1 <= len(graph.nodes) <= 2 or len(graph.inputs) != 1 or graph.outputs != graph.nodes[-1].outputs:
            return None
        norm, *behind = graph.nodes
        activation = "none"
        if behind:
            activation = applied(graph, behind[0]) if behind[0].args[:1] == (Ref(norm.outputs[0]),) else ""
        if norm.op != GROUP_NORM or norm.kwargs or activation not in (*ACTIVATIONS, *LEAKY):
            return None
        found = _norm(graph, norm, activation)
        if found is None or activation != "leaky_relu":
            return found
        return replace(found, slope=_slope(behind[0]) or 0.0)

    def constants(self, given: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
        """Scale and shift in fp32 [channels]; ones and zeros where there is none. Behind a leaky activation's its factors.

        Args:
            given: the subgraph's constants.
            device: where the results lie.
        """
        scale = given[0] if self.scale else torch.ones(self.channels, device=device)
        shift = given[int(self.scale)] if self.shift else torch.zeros(self.channels, device=device)
        found = [scale, shift]
        if self.activation in LEAKY:
            factor = given[-1] if self.activation == "prelu" else torch.full((1,), self.slope, device=device)
            found.append(factor.expand(self.channels))
        return tuple(tensor.detach().float().contiguous() for tensor in found)


def applied(graph: Graph, node: Node) -> str:
    """The activation that a node applies to its first argument, one of `ACTIVATIONS` or `LEAKY`; empty if it is none."""
    if node.op == "aten.leaky_relu.default":
        return "leaky_relu" if _slope(node) is not None else ""
    if node.op == "aten.prelu.default":
        weight = node.args[1]
        constant = isinstance(weight, Ref) and graph.values[weight.name].kind == "constant"
        return "prelu" if constant and not node.kwargs else ""
    found = activation_of(node)
    return found if found in ACTIVATIONS else ""


def _slope(node: Node) -> float | None:
    slope = node.args[1] if len(node.args) > 1 else dict(node.kwargs).get("negative_slope", 0.01)
    return float(slope) if isinstance(slope, (int, float)) else None


def _norm(graph: Graph, node: Node, activation: str) -> GroupNorm | None:
    x, groups, scale, shift, eps = (*node.args, *_DEFAULTS[len(node.args) :])[:5]
    if not isinstance(x, Ref) or not isinstance(groups, int) or not isinstance(eps, float):
        return None
    spec = graph.values[x.name].spec
    constants = [value.name for value in graph.constants()]
    given = [arg.name for arg in (scale, shift) if isinstance(arg, Ref)]
    if activation == "prelu":
        given.append(next(name for name in graph.nodes[1].refs() if name != node.outputs[0]))
    if len(spec.shape) not in (4, 5) or given != constants or groups < 1 or spec.shape[1] % groups:
        return None
    n, c, *sides = spec.shape
    shapes = [((c,), (1,)) if activation == "prelu" and name == given[-1] else ((c,),) for name in constants]
    specs = [graph.values[name].spec for name in constants]
    if any(each.shape not in known or each.dtype != spec.dtype for each, known in zip(specs, shapes, strict=True)):
        return None
    return GroupNorm(
        *(n, prod(sides), c, groups, scale is not None, shift is not None, eps, activation, spec.dtype),
        volumes=len(sides) == 3,
    )


def group_norms(graph: Graph, activations: Sequence[str] = ACTIVATIONS) -> Iterator[Sequence[str]]:
    """Each group norm with the activation, one of these, that alone reads it."""
    for node in graph.nodes:
        if node.op == GROUP_NORM:
            behind = only_reader(graph, node.outputs[0])
            if behind is not None and applied(graph, behind) in activations:
                yield (node.name, behind.name)
