"""Variants of SwapAbTile for other weight layouts and result dtypes of `igemm_swap_ab.cu`."""

from __future__ import annotations

from typing import ClassVar

from convoy.engines.hopper.igemm_swap_ab_limits import ROW_BYTES
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile


class UnpackedForm(SwapAbTile):
    """For a weight that is not packed, [k, r, s, c]."""

    __slots__ = ()
    weights: ClassVar[int] = 1


class TurnedForm(SwapAbTile):
    """For a gradient of x, which is a convolution with the weight [c, r, s, k], not packed."""

    __slots__ = ()
    weights: ClassVar[int] = 2


class WideForm(SwapAbTile):
    """For fp32 results of TF32 products."""

    __slots__ = ()
    wide: ClassVar[bool] = True


class PlanesForm(WideForm):
    """For x and weight in two planes of half types each, whose products are exact in fp32."""

    __slots__ = ()
    planes: ClassVar[int] = 2
    filter_bytes: ClassVar[int] = 2 * ROW_BYTES
