"""How `pruned.sparse24` cuts a convolution: as dense ones are cut, with a filter's block in 0.56 of the bytes."""

from __future__ import annotations

from typing import ClassVar

from convoy.engines.hopper.igemm_swap_ab_limits import HALOS
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile
from convoy.engines.sparse_weights.sparse24_packing import ROW_BYTES


class Sparse24Tile(SwapAbTile):
    """See the base class. The options that made dense weights faster, fewer boxes and odd rows, have not been measured here."""

    __slots__ = ()
    sparse: ClassVar[bool] = True
    filter_bytes: ClassVar[int] = ROW_BYTES
    splits: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)
    halos_of_split: ClassVar[int] = HALOS
    odd_rows: ClassVar[bool] = False
