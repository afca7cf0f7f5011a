"""Random weights for a subgraph of many layers: values stay of one size from the first layer to the last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from convoy.engines.torch_operators import DTYPES
from convoy.graph.ir import Graph
from convoy.regions.whole import is_layer, layers_of

MANY_LAYERS: Final = 4
"""Layers from which weights are scaled: with standard normal ones, values of fewer layers stay finite in fp16."""

GAIN: Final = 0.5
"""Standard deviation of a sum of products relative to its input's. Under one, because residual blocks add their input, and with
biases of standard deviation one no chain of layers vanishes."""


def net_weights(graph: Graph, seed: int, device: str) -> list[torch.Tensor] | None:
    """The constants of a subgraph of many layers, in order; None for a subgraph of few.

    They do not depend on the kind of data, so that an engine that compiles with the weights compiles once.

    Args:
        graph: the subgraph.
        seed: the same seed gives the same weights on the same kind of device.
        device: where they are.
    """
    if layers_of(graph.nodes) < MANY_LAYERS:
        return None
    generator = torch.Generator(device).manual_seed(seed)
    scales = _scales(graph)
    made: list[torch.Tensor] = []
    for value in graph.constants():
        dtype = DTYPES[value.spec.dtype]
        if not dtype.is_floating_point:
            made.append(torch.randint(0, 2, value.spec.shape, generator=generator, device=device, dtype=dtype))
            continue
        drawn = torch.randn(value.spec.shape, generator=generator, device=device)
        made.append((drawn * scales.get(value.name, 1.0)).to(dtype))
    return made


def _scales(graph: Graph) -> dict[str, float]:
    """Standard deviation of each layer's weight by the constant's name."""
    found: dict[str, float] = {}
    for node in filter(is_layer, graph.nodes):
        names: Sequence[str] = list(node.refs())
        weights = [name for name in names[1:] if len(graph.values[name].spec.shape) > 1]
        for name in weights:
            found[name] = GAIN / math.sqrt(max(1, math.prod(graph.values[name].spec.shape[1:])))
    return found
