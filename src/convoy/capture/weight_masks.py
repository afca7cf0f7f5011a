"""Where the weights of a captured net are zero: the masks that engines for pruned weights are given."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from convoy.capture.captured import Captured
from convoy.problem import WeightMask

LEAST_SPARSITY: Final = 0.3
"""Share of zeros from which a weight counts as pruned. Code for single non-zeros does about three quarters of a dense kernel's
multiply-adds a second (docs/kernels/sparse-weights.md): with fewer zeros it cannot win, and would be compiled and measured
for nothing."""


def weight_masks(captured: Captured) -> dict[str, WeightMask]:
    """Masks of the weights of convolutions that have many zeros, by constant name.

    Zeros are seen wherever they come from: plain zeros, masks of torch.nn.utils.prune (folded by capture), channels scaled by
    zero. A NaN is a value.
    """
    found: dict[str, WeightMask] = {}
    for node in captured.graph.nodes:
        if node.op != "conv2d":
            continue
        name = list(node.refs())[1]
        weight = captured.constants.get(name)
        if weight is not None and name not in found and (mask := mask_of(weight)).sparsity >= LEAST_SPARSITY:
            found[name] = mask
    return found


def mask_of(weight: torch.Tensor) -> WeightMask:
    """The positions of a weight's values that are not zero: [k, c / groups, r, s], any dtype and device."""
    k, c, r, s = weight.shape
    nonzero = (weight.detach() != 0).cpu().contiguous().numpy()
    return WeightMask((k, c, r, s), np.packbits(nonzero.ravel()).tobytes())
