"""Kinds of forms of `swapped.cu`: what weights and results are like, beside how the work is cut."""

from __future__ import annotations

from typing import ClassVar

from convoy.engines.hopper.igemm_swap_ab_tile_config import ROW_BYTES, SwapAbTile


class UnpackedForm(SwapAbTile):
    """Of a weight as it lies, [k, r, s, c]."""

    __slots__ = ()
    weights: ClassVar[int] = 1


class TurnedForm(SwapAbTile):
    """Of a weight as it lies, [c, r, s, k] of the convolution that a gradient of x is."""

    __slots__ = ()
    weights: ClassVar[int] = 2


class WideForm(SwapAbTile):
    """Of fp32 results: TF32 products."""

    __slots__ = ()
    wide: ClassVar[bool] = True


class PlanesForm(WideForm):
    """Of x and weights in two planes of halves each, for products that are exact in fp32."""

    __slots__ = ()
    planes: ClassVar[int] = 2
    filter_bytes: ClassVar[int] = 2 * ROW_BYTES
