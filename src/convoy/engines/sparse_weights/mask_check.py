"""The check of a weight against its mask, before its values are packed for code that was made for the mask."""

from __future__ import annotations

import torch

from convoy.errors import InputError


def check_zeros(weight: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise InputError where a weight has a value and the mask has none: the code would not read it.

    Args:
        weight: [k, c / groups, r, s].
        mask: booleans of that shape.
    """
    stray = weight[~mask.to(weight.device)]
    stray = stray[stray != 0]
    if stray.numel():
        expected = "zeros wherever the mask of the problem has none"
        raise InputError("weight", float(stray[0]), expected, "Other zeros are another problem: tune anew.")
