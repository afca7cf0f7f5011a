"""Weights for layers that follow each other in a subgraph: values neither overflow half precision nor vanish on their way."""

from __future__ import annotations

import math

import torch

from convoy.graph.ir import LAYERS, Graph

INTEGER_TERMS = 4
"""Products of each sum on integer data: from integers up to 4, three layers make none above 344, which fp16 holds exactly."""


def weights_in_chains(graph: Graph) -> frozenset[str]:
    """Names of the constants that are layers' weights, in a graph where one layer reads what another made; else none."""
    behind: set[str] = set()
    weights: set[str] = set()
    chained = False
    for node in graph.nodes:
        read = list(node.refs())
        layer = node.op in LAYERS
        follows = not behind.isdisjoint(read)
        chained |= layer and follows
        if layer or follows:
            behind.update(filter(None, node.outputs))
        if layer and graph.values[read[1]].kind == "constant":
            weights.add(read[1])
    return frozenset(weights) if chained else frozenset()


def weight_in_chain(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> torch.Tensor:
    """A weight [filters, ...] in fp32: few of ±1 in each filter on `integer` data, else normal values of unit-variance sums."""
    filters, length = shape[0], max(1, math.prod(shape[1:]))
    device = generator.device
    if kind != "integer":
        return torch.randn(shape, generator=generator, device=device) / math.sqrt(length)
    places = torch.randint(0, length, (filters, INTEGER_TERMS), generator=generator, device=device)
    signs = 1.0 - 2.0 * torch.randint(0, 2, (filters, INTEGER_TERMS), generator=generator, device=device)
    return torch.zeros(filters, length, device=device).scatter_(1, places, signs).reshape(shape)
