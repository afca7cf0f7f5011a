"""A group norm with the activation behind it, as a subgraph: what the engines that compute both in one go share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
"""Activations that the kernels apply."""

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
        shift: whether there is a summand for each channel, the last constant.
        eps: added to the variance.
        activation: one of `ACTIVATIONS`.
        dtype: of all values.
        volumes: whether x is [n, c, d, h, w].
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
        activation = activation_of(behind[0]) if behind and behind[0].args[:1] == (Ref(norm.outputs[0]),) else ""
        activation = "none" if not behind else activation
        if norm.op != GROUP_NORM or norm.kwargs or activation not in ACTIVATIONS:
            return None
        return _norm(graph, norm, activation)

    def constants(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and shift in fp32 [channels]; ones and zeros where there is none. `given`: the subgraph's constants."""
        device = given[0].device if given else torch.device("cpu")
        scale = given[0] if self.scale else torch.ones(self.channels, device=device)
        shift = given[-1] if self.shift else torch.zeros(self.channels, device=device)
        return scale.detach().float().contiguous(), shift.detach().float().contiguous()


def _norm(graph: Graph, node: Node, activation: str) -> GroupNorm | None:
    x, groups, scale, shift, eps = (*node.args, *_DEFAULTS[len(node.args) :])[:5]
    if not isinstance(x, Ref) or not isinstance(groups, int) or not isinstance(eps, float):
        return None
    spec = graph.values[x.name].spec
    constants = [value.name for value in graph.constants()]
    given = [arg.name for arg in (scale, shift) if isinstance(arg, Ref)]
    if len(spec.shape) not in (4, 5) or given != constants or groups < 1 or spec.shape[1] % groups:
        return None
    n, c, *sides = spec.shape
    if any(graph.values[name].spec.shape != (c,) or graph.values[name].spec.dtype != spec.dtype for name in constants):
        return None
    return GroupNorm(
        *(n, prod(sides), c, groups, scale is not None, shift is not None, eps, activation, spec.dtype),
        volumes=len(sides) == 3,
    )


def group_norms(graph: Graph) -> Iterator[Sequence[str]]:
    """Each group norm with the activation that alone reads it."""
    for node in graph.nodes:
        if node.op == GROUP_NORM:
            behind = only_reader(graph, node.outputs[0])
            if behind is not None and activation_of(behind) in ACTIVATIONS:
                yield (node.name, behind.name)
